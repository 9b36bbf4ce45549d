"""Packs documents into rows of one length, and writes shards. Tokenizes on all cores, in the `tokenizers` library.

    PackedRows       one endless stream of ids, cut into full rows. Ids that do not fill a row wait for the next batch
                     of documents; only the tail of a split, shorter than one row, is dropped, and its size reported
    WholeDocuments   the documents of one batch, side by side where they fit best; the rest of a row is padding. Each
                     token's document is stored beside its id. A document that is longer than a row is cut into pieces,
                     each a document of its own. Ends with the tokenizer's end-of-text token, which texts get unless the
                     tokenizer adds one
    WholeChats       chats as documents, by the tokenizer's own chat template. The tokens of answers are marked: only
                     those are learnt. They are those of the content of a message with role `assistant`, and the special
                     token right after it, which ends the turn

Memory does not grow with the corpus: it holds one batch of documents, of about 1 MB, and one shard.

Failure model: as of `training.data.prepare.dataset_writer`. An interrupted run continues after its last shard.
"""

import bisect
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from training.data import tokenizer as tokenizers
from training.data.formats.dataset import SEGMENTS, TARGETS, Feature, Shard
from training.data.prepare import dataset_writer
from training.data.prepare.corpus import Corpus, replace_surrogates
from training.data.prepare.dataset_writer import DatasetPlan, Ids, Mark, WrittenDataset
from training.data.tokenizer import Encode, Tokenizer
from training.errors import BadInput
from training.storage.hub import TOKENIZER_FILES, local_copy, tokenizer_folder

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096


class RowKind(ABC):
    """How a batch of documents becomes a part of the stream, and how rows of it are stored."""

    units: int  # of the stream, in a row
    more: Mapping[str, Any]  # keys of the manifest
    features: Mapping[str, Feature]

    @abstractmethod
    def encode(self, documents: list[str]) -> Ids:
        """Returns a batch's part of the stream, (units, ...): a unit is a token, or a finished row. Raises BadInput for
        a chat that can't be rendered."""

    @abstractmethod
    def write(self, url: str, number: int, units: Ids) -> Shard:
        """Writes the units of whole rows as shard `number` of the folder `url`. Returns the shard's manifest entry.
        Raises BadInput for an id beyond the vocabulary; StorageError."""

    @abstractmethod
    def note(self, dropped: int) -> str:
        """Returns what the command prints about the rows. `dropped`: units at the end that fill no row."""


class PackedRows(RowKind):
    """Full rows, cut from one stream of ids, in the plan's layout."""

    def __init__(self, plan: DatasetPlan, encode: Encode) -> None:
        self.units, self.more, self.features = plan.length, dataset_writer.PACKED, dataset_writer.plan_features(plan)
        self._plan, self._encode = plan, encode

    def encode(self, documents: list[str]) -> Ids:
        """Returns the ids of all documents, one after the other."""
        return np.concatenate(self._encode(documents))

    def write(self, url: str, number: int, units: Ids) -> Shard:
        return dataset_writer.write_packed(url, self._plan, number, units.reshape(-1, self.units))

    def note(self, dropped: int) -> str:
        return f"{dropped} tokens at the end fill no row"


@dataclass(frozen=True)
class PackingProgress:
    """Documents read, rows and shards written of a split, including those of an earlier, interrupted run."""

    documents: int
    records: int
    shards: int


def batches_of(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields batches of documents. One ends at BATCH_DOCUMENTS documents, or once it has BATCH_CHARACTERS or more."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_rows(
    url: str,
    plan: DatasetPlan,
    documents: Callable[[], Iterable[str]],
    kind: RowKind,
    *,
    overwrite: bool = False,
    progress: Callable[[PackingProgress], None] = lambda _: None,
) -> WrittenDataset:
    """Writes the dataset of one split to the folder `url`, or continues where an interrupted run stopped.

    Returns a complete dataset of the same plan as it is, without reading the corpus. Drops the ids after the last full
    row. `documents` is called to read the corpus, and must give the same documents each time; `kind` turns them into
    rows; `progress` is called after each shard. Raises BadInput when the folder holds something else (unless
    `overwrite`), or there is too little text for a row, and as `kind`; and StorageError."""
    existing = dataset_writer.find_existing(url, plan, overwrite)
    if existing is not None:
        return WrittenDataset(existing, reused=True)
    marks = dataset_writer.begin_dataset(url, plan)
    shards = [mark.shard for mark in marks]
    start, written = (marks[-1].document, marks[-1].tokens) if marks else (0, 0)
    per_shard, documents_read = plan.records_per_shard * kind.units, start
    waiting: list[Ids] = []  # units that are in no shard yet: after each batch of documents too few for one

    def report() -> None:
        progress(PackingProgress(documents_read, sum(shard.records for shard in shards), len(shards)))

    for batch in batches_of(itertools.islice(documents(), start, None)):
        first, documents_read = documents_read, documents_read + len(batch)
        units = kind.encode(batch)
        waiting.append(units[written:])  # without those in a shard of an interrupted run
        written = max(0, written - len(units))
        if sum(map(len, waiting)) < per_shard:
            continue
        rest = np.concatenate(waiting)
        while len(rest) >= per_shard:
            shards.append(kind.write(url, len(shards), rest[:per_shard]))
            rest = rest[per_shard:]  # of this batch alone, in which the shard ends
            mark = Mark(number=len(shards) - 1, shard=shards[-1], document=first, tokens=len(units) - len(rest))
            dataset_writer.write_mark(url, mark)
            report()
        waiting = [rest]
    count = sum(map(len, waiting))
    dropped = count % kind.units
    if count >= kind.units:
        shards.append(kind.write(url, len(shards), np.concatenate(waiting)[: count - dropped]))
    if not shards:
        raise BadInput(
            f"{url}: the {plan.split} split has {count} tokens in {documents_read} documents, less than one row of "
            f"{plan.length}: give more text, a shorter --sequence-length, or another --evaluation-percent"
        )
    report()
    dataset = dataset_writer.finish_dataset(url, plan, kind.features, shards, kind.more)
    return WrittenDataset(dataset, f"from {documents_read} documents; {kind.note(dropped)}")


class WholeDocuments(RowKind):
    """Rows of whole documents. The stream is of rows, (n, 3, length): ids, segments and targets."""

    units = 1
    columns: ClassVar[tuple[str, ...]] = (SEGMENTS,)

    def __init__(self, plan: DatasetPlan, tokenizer: Tokenizer, encode: Encode) -> None:
        """Writes nothing yet. `encode`: returns the ids of each text."""
        assert tokenizer.special.end is not None
        self._plan, self._encode, self.more = plan, encode, {"rows": "documents"}
        self._pad, self._end = tokenizer.special.pad, tokenizer.special.end
        self._places, self._used, self._cut = 0, 0, 0
        number = Feature(dtype="uint16", shape=["length"])
        self.features = {**dataset_writer.id_features(plan.vocabulary), **dict.fromkeys(self.columns, number)}

    def encode(self, documents: list[str]) -> Ids:
        """Returns rows of the documents' pieces, as `cut` cuts them, (rows, 3, length): ids, numbers of their pieces
        in the row from 1 (0: padding), and 1 if learnt. Counts filled places, for `note`. Raises as `tokenize`."""
        length = self._plan.length
        pieces = [piece for document in self.tokenize(documents) for piece in self.cut(document, length)]
        rows = best_fit([piece.shape[1] for piece in pieces], length)
        packed = np.zeros((len(rows), 3, length), np.int32)
        packed[:, 0] = self._pad
        for row, members in enumerate(rows):
            start = 0
            for number, member in enumerate(members, 1):
                ids, targets = pieces[member]
                place = slice(start, start + len(ids))
                packed[row, 0, place], packed[row, 1, place], packed[row, 2, place] = ids, number, targets
                start = place.stop
            self._used += start
        self._places += length * len(rows)
        return packed

    def tokenize(self, documents: list[str]) -> list[Ids]:
        """Returns (2, n) for each document: ids, with the end-of-text token last, and 1 at each: all are learnt."""
        encoded = self._encode(documents)
        whole = [ids if len(ids) and ids[-1] == self._end else np.append(ids, np.int32(self._end)) for ids in encoded]
        return [np.stack([ids, np.ones_like(ids)]) for ids in whole]

    def cut(self, document: Ids, length: int) -> list[Ids]:
        """Returns the pieces, of at most `length` tokens each, of a document, (2, n) as `tokenize` returns it. Counts
        cut documents, for `note`."""
        self._cut += document.shape[1] > length
        return [document[:, start : start + length] for start in range(0, document.shape[1], length)]

    def write(self, url: str, number: int, units: Ids) -> Shard:
        """Writes finished rows, (n, 3, length), as shard `number`, targets only if rows are chats. Raises as
        `RowKind.write`."""
        columns = dict(zip(("input_ids", SEGMENTS, TARGETS), units.transpose(1, 0, 2), strict=True))
        return dataset_writer.write_columns(url, self._plan, self.features, f"{number:05d}", columns)

    def note(self, dropped: int) -> str:
        """Returns how full the rows are, and how many documents were cut."""
        return (
            f"{self._used / max(1, self._places):.1%} of the places filled; {self._cut} documents were longer than "
            f"{self._plan.length} tokens and were cut"
        )


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Returns rows as lists of numbers of documents: the longest document first, each into the fullest row that has
    room for it. `lengths`: tokens of each document, at most `room`."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (places left, row), ascending
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect.bisect_left(free, (lengths[number], -1))
        left, row = free.pop(place) if place < len(free) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        bisect.insort(free, (left - lengths[number], row))
    return rows


ANSWER = "assistant"

Messages = Sequence[Mapping[str, Any]]


def chats(corpus: Corpus) -> Iterator[str]:
    """Yields the chats of a corpus, whose rows hold lists of messages, as JSON text; values that JSON lacks, such as
    dates, as text. Raises BadInput, with the row's place, for a row without such a list (text that holds JSON is none),
    without an answer that has text, or with one that is something else."""
    for number, row in enumerate(corpus.rows(), 1):
        place = getattr(row, "place", None) or f"{corpus.name}: row {number}"
        messages = row.get(corpus.field)
        if messages is None:
            raise BadInput(f"{place} has no {corpus.field!r}, it has: {', '.join(map(repr, row))}. Name it with --chat")
        if mistake := _chat_mistake(messages, corpus.field):
            raise BadInput(f"{place}: {mistake}")
        yield replace_surrogates(json.dumps(messages, ensure_ascii=False, default=str))


def _chat_mistake(messages: Any, field: str) -> str | None:
    """Returns why the value of a row's `field` is no chat that can be learnt; None if it is one."""
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_list or not all(isinstance(message.get("role"), str) for message in messages):
        return f"{field!r} is not a list of messages with role and content"
    contents = [message.get("content") for message in messages if message["role"] == ANSWER]
    for content in contents:
        if not isinstance(content, str | None):
            kind = type(content).__name__
            return f"an answer's content is not text but {kind}: make it one text, or leave such rows out of the corpus"
    if not any((content or "").strip() for content in contents):
        return f"the chat has no answer (a message of role {ANSWER} with text), so nothing to learn"
    return None


class WholeChats(WholeDocuments):
    """Rows of whole chats. One that is longer than a row is cut at its end."""

    columns = (SEGMENTS, TARGETS)

    def __init__(self, plan: DatasetPlan, tokenizer: Tokenizer, template: Any) -> None:
        """Loads the tokenizer. `template`: the same one as `open_template` returns it, to render chats."""
        super().__init__(plan, tokenizer, lambda _texts: [])
        self._tokenizer, self._template, self._dropped = tokenizers.load(tokenizer), template, 0
        self._special = tokenizer.special.special

    def tokenize(self, documents: list[str]) -> list[Ids]:
        """Returns (2, n) for each chat, which is JSON text: ids, and 1 at tokens of answers and at a special token
        right behind an answer, else 0. Raises BadInput as `_render`."""
        rendered = [self._render(json.loads(document)) for document in documents]
        encodings = self._tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        return [self._mark(*pair) for pair in zip(encodings, (spans for _, spans in rendered), strict=True)]

    def cut(self, document: Ids, length: int) -> list[Ids]:
        """Returns a list of the chat's first `length` tokens, (2, n); [] if none after the first is learnt. Counts, for
        `note`, chats cut and left out."""
        self._cut += document.shape[1] > length
        kept = document[:, :length]
        self._dropped += not kept[1, 1:].any()
        return [kept] if kept[1, 1:].any() else []

    def note(self, dropped: int) -> str:
        """Returns how full the rows are, and how many chats were cut, and left out."""
        return f"{super().note(dropped)}; {self._dropped} had no answer left and were left out"

    def _render(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Returns a chat's text, and [begin, end) of each answer that is not blank in it, in characters. Raises
        BadInput if the template refuses the chat or changes an answer, other than white space at its ends."""
        whole, spans = self._apply(messages), list[tuple[int, int]]()
        for number, message in enumerate(messages):
            if message["role"] != ANSWER or not (answer := (message.get("content") or "").strip()):
                continue
            if number:
                before = self._apply(messages[:number], add_generation_prompt=True)
            else:  # transformers refuses a chat of no messages: take what a chat with another answer begins with
                before = self._apply([{**message, "content": "\0"}]).partition("\0")[0]
            after = len(before) if whole.startswith(before) else spans[-1][1] if spans else 0
            start = whole.find(answer, after)
            if start < 0:
                raise BadInput(f"the chat template does not show the answer {answer!r:.60} as it is: no loss on it")
            spans.append((start, start + len(answer)))
        return whole, spans

    def _apply(self, messages: Messages, **options: Any) -> str:
        """Returns the chat as text by the tokenizer's chat template. Raises BadInput if the template refuses it."""
        try:
            text: str = self._template.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # of the template's own code
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            roles = ", ".join(str(message["role"]) for message in messages)
            raise BadInput(f"the tokenizer's chat template refuses a chat of roles {roles}: {reason:.200}") from None
        return text

    def _mark(self, encoding: Any, spans: Sequence[tuple[int, int]]) -> Ids:
        """Returns (2, n): ids, and 1 at tokens in `spans` of the text and at a special token behind each, else 0."""
        ids, offsets = np.array(encoding.ids, np.int32), np.array(encoding.offsets).reshape(-1, 2)  # (n,), (n, 2)
        targets = np.zeros_like(ids)
        for start, end in spans:
            inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
            targets[inside] = 1
            after = inside[-1] + 1 if len(inside) else len(ids)
            if after < len(ids) and int(ids[after]) in self._special:
                targets[after] = 1
        return np.stack([ids, targets])


def open_template(url: str) -> Any:
    """Returns transformers' tokenizer of a folder or a name on the Hub, which is downloaded. Raises BadInput without
    transformers or a chat template, or if transformers can't load it; StorageError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise BadInput("--chat needs the `transformers` package: run it in the image") from None
    with local_copy(tokenizer_folder(url), TOKENIZER_FILES) as folder:
        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise BadInput(f"{url}: transformers can't load the tokenizer, as --chat needs: {reason:.200}") from None
    if not loaded.chat_template:
        raise BadInput(f"{url}: the tokenizer has no chat template, which --chat needs: take one of a chat model")
    return loaded
