"""Reads corpora (`--corpus` of the commands) as streams of documents.

    builtin:pydoc                       Python's own help topics (pydoc_data.topics), one document per topic; for
                                        trials, it needs no file
    PATH or gs://...  .txt .tokens .md  UTF-8; paragraphs between blank lines are documents
                      .jsonl .ndjson    one JSON object per line; `field` names the text
                      .conll            a word and its label a line (the first and the last column), blank lines
                                        between texts
                      .csv .tsv         with a header line; `field` names the column; .tsv without quotation marks
                      .parquet          `field` names the column; other columns are not read
                      a folder          all files of these kinds below it, at any depth, sorted by URL
    datasets:NAME[:CONFIG[:SPLIT]]      the Hugging Face `datasets` library (a name on the Hub, or a folder that
                                        `load_dataset` takes), streamed: nothing of it is kept on the disk

Corpora are never held in memory. Documents without text are skipped. The split of a document follows from its text
alone: equal documents are always in the same split, and adding documents moves none. A byte order mark at the beginning
of a file is dropped, and half a surrogate pair, which JSON can hold and UTF-8 can't, becomes U+FFFD.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from training import storage
from training.errors import BadInput

TEXT = (".txt", ".tokens", ".md")
LINES = (".jsonl", ".ndjson")
TABLE = (".csv", ".tsv")
COLUMNS = (".conll",)
PARQUET = (".parquet",)
KINDS = TEXT + LINES + TABLE + COLUMNS + PARQUET
_PIECE_BYTES = 8 << 20
_PARQUET_ROWS = 64  # decoded together; texts may be long
_LONGEST_CELL = 1 << 28  # characters of a .csv; more means a quotation mark that is not closed


class Row(dict[str, Any]):
    """Column -> value. `place`, for messages: file:line of the end of a row that comes from a file."""

    def __init__(self, place: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.place = place


@dataclass(frozen=True)
class Corpus:
    """A corpus by its name. `field` is the column or key that holds the text, `label` that of a label, `pair` that of
    a second text, if any. All calls on one object read the same revision of a dataset on the Hub."""

    name: str
    field: str = "text"
    label: str | None = None
    pair: str | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields each row, column -> value, in a fixed order, unchecked. Paragraphs of text files and topics of
        `builtin:pydoc` are at `field`; Parquet and `datasets:` give only this object's columns, if all exist. Raises
        BadInput, StorageError."""
        if self.name == "builtin:pydoc":
            from pydoc_data.topics import topics

            for topic in sorted(topics):
                yield {self.field: topics[topic]}
        elif self.name.startswith("builtin:"):
            raise BadInput(f"--corpus {self.name}: the only built-in corpus is builtin:pydoc")
        elif self.name.startswith("datasets:"):
            yield from self._streamed_rows()
        else:
            for url in self.files():
                yield from (
                    _parquet(url, self._columns) if url.endswith(PARQUET) else _file_rows(url, *self._columns[:2])
                )

    def documents(self) -> Iterator[str]:
        """Yields the texts that are not blank. Raises BadInput for a row without text, and as `rows`."""
        for row in self.rows():
            text = self.text(row)
            if text.strip():
                yield text

    def text(self, row: dict[str, Any]) -> str:
        """Returns a row's text as `text_of`; it may be empty. Raises BadInput if the field is missing or no text."""
        return text_of(row, self.field, getattr(row, "place", None) or f"--corpus {self.name}: a row")

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hash, in hex, of the last part of `name`, `field`, and files' names, sizes and CRC-32Cs; for
        `datasets:` the Hub's revision or local files' times; for `builtin:` the texts. The first call reads local
        files, and of a bucket or the Hub only descriptions. Raises BadInput, StorageError."""
        digest = hashlib.sha256(f"{self.name.rsplit('/', 1)[-1]}\0{self.field}".encode())
        if self.name.startswith("builtin:"):
            for document in self.documents():
                digest.update(hashlib.sha256(document.encode()).digest())
        elif self.name.startswith("datasets:"):
            builder, split = self._builder
            digest.update("\0".join([builder.config_id, str(builder.hash), split]).encode())
        else:
            for url in self.files():
                stat = storage.stat(url)
                assert stat is not None
                digest.update(f"\0{storage.name_of(url)}\0{stat.size}\0{stat.crc32c}".encode())
        return digest.hexdigest()

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """Returns the names of the classes that numbers in the label's column mean, of a dataset of the `datasets`
        library that says them; () otherwise. The first call downloads its description. Raises BadInput."""
        if not self.name.startswith("datasets:"):
            return ()
        feature = (self._streamed().features or {}).get(self.label)
        return tuple(getattr(getattr(feature, "feature", feature), "names", ()))

    def files(self) -> list[str]:
        """Returns the URLs of the corpus's files in order; of a folder, those of known kinds at any depth; [name] for
        `builtin:` and `datasets:`. Raises BadInput without any."""
        if self.name.startswith(("builtin:", "datasets:")):
            return [self.name]
        if storage.stat(self.name) is not None:
            return [self.name]
        urls = [stat.url for stat in storage.listing(self.name) if stat.url.endswith(KINDS)]
        if not urls:
            kinds = ", ".join(KINDS)
            raise BadInput(f"--corpus {self.name}: no such file, and no folder with files of a known kind ({kinds})")
        return urls

    @property
    def _columns(self) -> list[str]:
        """Returns the names of the columns with text, label and second text, as far as they are given."""
        return [name for name in (self.field, self.label, self.pair) if name]

    @cached_property
    def _builder(self) -> tuple[Any, str]:
        """Returns the builder of datasets:NAME[:CONFIG[:SPLIT]], pinned to the Hub's newest revision, and the split,
        "train" unless named. Downloads a description, no data. Turns any failure into BadInput."""
        try:
            import datasets
        except ImportError:
            raise BadInput(
                f"--corpus {self.name} needs the `datasets` package: run this in the image, or "
                "pip install 'tpu-launch[train]'"
            ) from None
        path, config, split, *_ = [*self.name.removeprefix("datasets:").split(":", 2), "", ""]
        with self._any_failure():
            return datasets.load_dataset_builder(path, config or None), split or "train"

    def _streamed(self) -> Any:
        """Returns a dataset of the `datasets` library, of which no row is read yet. Turns any failure into BadInput."""
        builder, split = self._builder
        with self._any_failure():
            return builder.as_streaming_dataset(split=split)

    def _streamed_rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of a dataset of the `datasets` library as they arrive; only this object's columns, if all
        exist. Turns any failure into BadInput."""
        rows = self._streamed()
        with self._any_failure(". After a lost connection, run this again: it continues after the last shard"):
            if set(self._columns) <= set(rows.column_names or ()):
                rows = rows.select_columns(self._columns)  # others may hold images, which would be decoded
            yield from rows

    @contextlib.contextmanager
    def _any_failure(self, advice: str = "") -> Iterator[None]:
        """Turns any exception of the block, as the library raises them, into BadInput; `advice` ends its message."""
        try:
            yield
        except Exception as error:
            raise BadInput(f"--corpus {self.name}: {type(error).__name__}: {error}{advice}") from error


def text_of(row: Mapping[str, Any], field: str, place: str) -> str:
    """Returns a row's text, with U+FFFD for half surrogate pairs. `place`: for messages. Raises BadInput if it is
    absent or no text."""
    if row.get(field) is None:
        raise BadInput(f"{place} has no {field!r}, it has: {', '.join(map(repr, row))}. Name the text with --field")
    text = row[field]
    if not isinstance(text, str):
        raise BadInput(f"{place}: {field!r} is not text but {type(text).__name__}. Name the text with --field")
    return replace_surrogates(text)


def replace_surrogates(text: str) -> str:
    """Returns a text that UTF-8 can hold: half surrogate pairs become U+FFFD, whole ones their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def is_in_split(text: str, split: str, percent: float | None) -> bool:
    """Returns whether a document is in a split, by a hash of its text alone: about `percent` (0 to 100) of all
    documents are in "evaluation", the others in any other split; None: every document is in every split."""
    if percent is None:
        return True
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return (digest < percent / 100 * 2**64) == (split == "evaluation")


def _stat(url: str) -> storage.Stat:
    """Returns the state of a file. Raises BadInput if it does not exist."""
    stat = storage.stat(url)
    if stat is None:
        raise BadInput(f"{url} does not exist")
    return stat


def lines(url: str) -> Iterator[str]:
    """Yields a UTF-8 file's lines without line ends and byte order mark. Raises BadInput for other bytes or no file;
    and StorageError, also for a file that changes meanwhile."""
    stat = _stat(url)
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest, line_number = "", 1
    for start in range(0, stat.size, _PIECE_BYTES):
        data = storage.read(url, start, start + _PIECE_BYTES, generation=stat.generation)
        try:
            text = rest + decoder.decode(data, final=start + _PIECE_BYTES >= stat.size)
        except UnicodeDecodeError as error:
            raise BadInput(
                f"{url}: not UTF-8 text near byte {start + error.start} (after line {line_number}): convert it"
            ) from None
        if not start:
            text = text.removeprefix("\ufeff")
        *whole, rest = text.split("\n")
        line_number += len(whole)
        yield from (line.removesuffix("\r") for line in whole)
    if rest:
        yield rest.removesuffix("\r")


def _file_rows(url: str, field: str, label: str = "label") -> Iterator[dict[str, Any]]:
    """Yields the rows of one file, by its extension: JSON objects (LINES), rows of a table (TABLE), texts of words
    (COLUMNS) as {field: words, label: labels}; any other file counts as text, each paragraph as {field: paragraph}.
    Raises BadInput for a missing file, text that is not UTF-8, a row that can't be parsed, and an ending that is .json,
    or one of those in capitals; and StorageError."""
    if url.endswith(LINES):
        for number, line in enumerate(lines(url), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise BadInput(f"{url}:{number}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise BadInput(f"{url}:{number}: expected a JSON object")
                yield Row(f"{url}:{number}", row)
    elif url.endswith(TABLE):
        yield from _table(url)
    elif url.endswith(COLUMNS):
        yield from _columns(url, field, label)
    elif url.lower().endswith((".json", *LINES, *TABLE, *COLUMNS)):
        raise BadInput(
            f"{url} would be read as text: rename it to .jsonl, if each line is an object, or to .csv or .tsv"
        )
    else:
        for paragraph in _paragraphs(lines(url)):
            yield {field: paragraph}


def _columns(url: str, field: str, label: str) -> Iterator[dict[str, Any]]:
    """Yields {field: words, label: labels} of each text of a file in CoNLL's columns, between spaces or tabs: the first
    is the word, the last its label, and a blank line ends a text. Skips -DOCSTART- lines. Raises BadInput for a line of
    one column, and as `lines`."""
    # A word may hold other white space, such as the no-break space of a French number.
    columns_of = partial(re.findall, "[^ \t]+")
    numbered = ((number, line, columns_of(line) if line.strip() else []) for number, line in enumerate(lines(url), 1))
    for has_columns, group in itertools.groupby(numbered, key=lambda entry: bool(entry[2])):
        text: list[list[str]] = []
        for number, line, columns in group if has_columns else ():
            if columns[0] == "-DOCSTART-":
                continue
            if len(columns) < 2:
                raise BadInput(f"{url}:{number}: a word and its label expected, not {line!r:.80}")
            text.append(columns)
        if text:
            yield Row(f"{url}:{number}", {field: [line[0] for line in text], label: [line[-1] for line in text]})


def _table(url: str) -> Iterator[dict[str, Any]]:
    """Yields the rows, column -> text, of a .csv or .tsv file; quotation marks are text in a .tsv. Raises BadInput for
    a column named twice, a row of another length, a cell longer than `_LONGEST_CELL`, or a quotation mark that is not
    closed at its cell's end. Until it ends, csv's limit for a cell is larger in the whole process."""
    tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if url.endswith(".tsv") else {}
    reader = csv.DictReader((line + "\n" for line in lines(url)), strict=True, **tabs)
    limit = csv.field_size_limit(_LONGEST_CELL)  # of the process; 131,072 by default
    try:
        columns = reader.fieldnames or []
        if twice := sorted({column for column in columns if columns.count(column) > 1}):
            raise BadInput(
                f"{url}:1: the header names {', '.join(map(repr, twice))} more than once: rename the columns"
            )
        for row in reader:
            if None in row or None in row.values():
                raise BadInput(f"{url}:{reader.line_num}: {len(columns)} columns expected, as in the header")
            yield Row(f"{url}:{reader.line_num}", row)
    except csv.Error as error:
        raise BadInput(f"{url}:{reader.reader.line_num}: {error}: is a quotation mark not closed?") from None
    finally:
        csv.field_size_limit(limit)


def _parquet(url: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a .parquet file: these columns, or all if one is missing. Raises BadInput for a damaged
    file or without pyarrow, and StorageError."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise BadInput(f"{url} needs the `pyarrow` package: run this in the image") from None
    stat, number = _stat(url), 0
    source = storage.RangedFile(stat.size, partial(storage.read, url, generation=stat.generation))
    try:
        file = pyarrow.parquet.ParquetFile(source, buffer_size=_PIECE_BYTES, page_checksum_verification=True)
        chosen = columns if set(columns) <= set(file.schema_arrow.names) else None
        for batch in file.iter_batches(_PARQUET_ROWS, columns=chosen):
            for row in batch.to_pylist():
                number += 1
                yield Row(f"{url}: row {number}", row)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{url}: damaged after row {number}, or not Parquet: {error}") from None


def _paragraphs(text: Iterable[str]) -> Iterator[str]:
    """Yields paragraphs: consecutive lines, joined by line ends; blank lines separate them."""
    for has_text, together in itertools.groupby(text, key=lambda line: bool(line.strip())):
        if has_text:
            yield "\n".join(together)
