"""Writes datasets of labelled rows: one text, or two, and the label per row, in shards by length.

A row is padded to the shortest of a few lengths (buckets) that holds it, so that a batch of short texts is not computed
at the length of the longest; texts longer than the longest bucket are cut, and counted. Shards have one feature more
than those of `training.data.prepare.pack`, `label`:

  class-labelled rows    class numbers of named classes (int32)
  number-labelled        finite numbers (float32)
  set-labelled           any number of named classes, each 0 or 1 (uint8)
  token-labelled         the class number of each word at its first token (int32)

and, in rows of two texts, `token_type_ids` (uint8): 1 at the second one.

Failure model: an interrupted run starts again from the beginning, and writes the same bytes; such datasets are small.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from training.data.formats.dataset import IGNORED, LABEL, LABEL_DTYPES, TYPES, Feature, Rows, Shard, label_shape
from training.data.prepare import dataset_writer
from training.data.prepare.corpus import replace_surrogates, text_of
from training.data.prepare.dataset_writer import DatasetPlan, Ids, WrittenDataset
from training.errors import BadInput

BATCH_ROWS = 4096

Text = str | tuple[str, ...]  # or its words, or two texts
LabelledText = tuple[Text, Any]  # and its label as the corpus has it: text, or a list of texts
EncodeTexts = Callable[[list[Any]], Sequence[Ids]]  # of `Text`s


@dataclass(frozen=True)
class LabelKind:
    """How the labels of one kind of rows are stored. The number of a class is its place in `names`, which are empty for
    numbers, and until the corpus was read. `numbers` are the corpus's own names, if it has them: its integers mean
    these, also where they look like a name."""

    rows: Rows = "class-labelled"
    names: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @property
    def is_list(self) -> bool:  # a label of the corpus is a list of names
        return self.rows in ("set-labelled", "token-labelled")

    @property
    def has_names(self) -> bool:
        return self.rows != "number-labelled"

    @property
    def feature(self) -> Feature:
        return Feature(dtype=LABEL_DTYPES[self.rows][0], shape=label_shape(self.rows, len(self.names)))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def encode(self, label: Any, place: str) -> Any:
        """Returns a label as it is stored: a float, a class's number, an array of each word's class number or, of a
        set, a list of one bool a class. Raises BadInput, with `place` before the message, for an unknown class, and for
        a number that is no finite float32."""
        if self.rows == "number-labelled":
            return _parse_number(label, place)
        names = label if self.is_list else [label]
        for name in names:
            if name not in self._numbers:
                known = ", ".join(self.names[:5])
                raise BadInput(f"{place}: label {name!r} is not among the {len(self.names)} labels ({known}, ...)")
        numbers = [self._numbers[name] for name in names]
        if self.rows == "set-labelled":
            return [number in numbers for number in range(len(self.names))]
        return np.array(numbers, np.int32) if self.is_list else numbers[0]


def _parse_number(label: str, place: str) -> float:
    """Returns the number that a label is. Raises BadInput, after `place`, unless it is a finite float32."""
    try:
        number = float(label)
    except ValueError:
        raise BadInput(f"{place}: label {label!r} is not a number: name the column with --label") from None
    if not math.isfinite(number) or abs(number) > float(np.finfo(np.float32).max):
        raise BadInput(f"{place}: label {label!r} is not a finite float32: leave such rows out of the corpus")
    return number


def default_lengths(longest: int) -> tuple[int, ...]:
    """Returns, ascending, `longest` and those of its half, quarter and so on, rounded down, that are 16 or more."""
    lengths = [longest]
    while lengths[0] // 2 >= 16:
        lengths.insert(0, lengths[0] // 2)
    return tuple(lengths)


def select_columns(
    rows: Iterable[Mapping[str, Any]],
    text: str,
    label: str,
    corpus: str,
    labels: LabelKind = LabelKind(),
    pair: str | None = None,
) -> Iterator[LabelledText]:
    """Yields the text, or the two texts, and the label of each row (column -> value) of the corpus with this name.

    `text`, `label` and, if a row has two texts, `pair` name the columns. The text of labelled words is a list of these;
    rows without words are left out. `labels` says how to read each label. Raises BadInput, with file:line or the corpus
    and the row's number, for a row that lacks a column, whose text is not text, or whose label is impossible."""
    for number, row in enumerate(rows, 1):
        place = getattr(row, "place", None) or f"{corpus}: row {number}"
        missing = [name for name in (text, label, *([pair] if pair else [])) if row.get(name) is None]
        if missing:
            has = f"{place} has no {missing[0]!r}, it has: {', '.join(map(repr, row))}"
            raise BadInput(f"{has}. Name the columns: --field, --label, --text-pair")
        own = _label_of(row[label], place, labels)
        if pair:
            yield (text_of(row, text, place), text_of(row, pair, place)), own
        elif labels.rows != "token-labelled":
            yield text_of(row, text, place), own
        elif words := _words_of(row, text, place, len(own)):
            yield words, own


def _label_of(value: Any, place: str, labels: LabelKind) -> Any:
    """Returns the label of a row, text, a number or a truth value, as text; for sets and words a list of these. Raises
    BadInput, with `place` before the message, unless it is one of `labels`; any printable class, if they have none."""
    if labels.is_list and not isinstance(value, list):
        raise BadInput(f"{place}: label {value!r:.80} is not a list of labels: name the column with --label")
    label = (
        [_label_name(name, place, labels) for name in value] if labels.is_list else _label_name(value, place, labels)
    )
    if labels.names or not labels.has_names:
        labels.encode(label, place)
    return label


def _label_name(value: Any, place: str, labels: LabelKind) -> str:
    """Returns a label of the corpus as text; of an integer the name that it means in `labels.numbers`, or, without
    these and if it is no name itself, in `labels.names`. Raises BadInput, with `place` before the message, for what
    can't be a label."""
    if not isinstance(value, str | int | float):
        raise BadInput(
            f"{place}: label {value!r:.80} is neither text nor a number but {type(value).__name__}: name the column "
            "with --label"
        )
    name = str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{place}: label {name} is not a finite number: leave such rows out of the corpus")
    if type(value) is int and (labels.numbers or name not in labels.names):
        meanings = labels.numbers or labels.names
        if 0 <= value < len(meanings):
            return meanings[value]
        if labels.numbers:
            last = len(meanings) - 1
            raise BadInput(
                f"{place}: label {name} is no class's number, 0 to {last}: leave such rows out of the corpus"
            )
    if labels.has_names and not labels.names and (mistake := label_mistake(name)):
        raise BadInput(f"{place}: label {name!r:.80} {mistake}")
    return name


def _words_of(row: Mapping[str, Any], field: str, place: str, labels: int) -> tuple[str, ...]:
    """Returns the words of a row that has the field, U+FFFD for half surrogate pairs. `place`: for messages. Raises
    BadInput unless they are texts, and as many as its `labels`."""
    words = row[field]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BadInput(f"{place}: {field!r} is not a list of words. Name it with --field")
    if len(words) != labels:
        raise BadInput(f"{place} has {len(words)} words in {field!r} and {labels} labels: each word needs one")
    return tuple(map(replace_surrogates, words))


def label_mistake(name: str) -> str | None:
    """Returns why a text (blank, white space at an end, unprintable) can't be a class's name; None if it can."""
    if not name.strip():
        return "is empty: leave such rows out of the corpus"
    if name != name.strip():
        return "begins or ends with white space, so that it would be a class beside the one without: remove it"
    if not name.isprintable():
        return "has characters that can't be shown: remove them"
    return None


def write_labelled_rows(
    url: str,
    plan: DatasetPlan,
    lengths: Sequence[int],
    labels: LabelKind,
    rows: Callable[[], Iterable[LabelledText]],
    encode: EncodeTexts,
    pad: int,
    *,
    has_pairs: bool = False,
    ends_special: bool = True,
    overwrite: bool = False,
) -> WrittenDataset:
    """Writes a dataset of labelled rows to the folder `url`. Returns a complete dataset of the same plan as it is.
    `lengths` are those of rows, ascending; the last is `plan.length`. A longer text is cut, but keeps its final token
    if that is a special one, as `ends_special` says. `rows` is called to read the corpus, and must give the same rows
    each time; `encode` returns the ids of each text, (tokens,), with special tokens around them; of words, (2, tokens):
    the ids, and the word's number at its first token, -1 at others; of two texts, (2, tokens), not too many: the ids,
    and the number of the text. `has_pairs`: rows are two texts. Raises BadInput when the folder holds something else
    (unless `overwrite`), a label is impossible, or there is no row; and StorageError."""
    assert plan.length == lengths[-1]
    existing = dataset_writer.find_existing(url, plan, overwrite)
    if existing is not None:
        return WrittenDataset(existing, reused=True)
    dataset_writer.begin_dataset(url, plan)
    features = dataset_writer.id_features(plan.vocabulary)
    features[LABEL] = labels.feature
    if has_pairs:
        features[TYPES] = Feature(dtype="uint8", shape=["length"])
    waiting: dict[int, list[tuple[Ids, Any]]] = {length: [] for length in lengths}
    shards: dict[int, list[Shard]] = {length: [] for length in lengths}
    cut = 0

    def flush(length: int) -> None:
        shards[length].append(_write_rows(url, plan, features, length, len(shards[length]), waiting[length], pad))
        waiting[length] = []

    iterator = iter(rows())
    for batch in iter(lambda: list(itertools.islice(iterator, BATCH_ROWS)), []):
        for (_, label), ids in zip(batch, encode([text for text, _ in batch]), strict=True):
            value = labels.encode(label, url)
            if ids.shape[-1] > plan.length:
                cut += 1
                ids = np.delete(ids, np.s_[plan.length - ends_special : ids.shape[-1] - ends_special], axis=-1)
            if labels.rows == "token-labelled":
                ids, words = ids  # (tokens,) each
                value = np.where(words >= 0, value[words], IGNORED)  # (tokens,)
            length = next(length for length in lengths if ids.shape[-1] <= length)
            waiting[length].append((ids, value))
            if len(waiting[length]) == plan.records_per_shard:
                flush(length)
    for length in lengths:
        if waiting[length]:
            flush(length)
    ordered = [shard for length in lengths for shard in shards[length]]
    if not ordered:
        raise BadInput(f"{url}: the {plan.split} split has no rows: give another --corpus or --evaluation-percent")
    more = {"rows": labels.rows, "labels": list(labels.names)}
    dataset = dataset_writer.finish_dataset(url, plan, features, ordered, more)
    return WrittenDataset(dataset, f"{cut} texts were longer than {plan.length} tokens and were cut")


def _write_rows(
    url: str,
    plan: DatasetPlan,
    features: Mapping[str, Feature],
    length: int,
    number: int,
    rows: Sequence[tuple[Ids, Any]],
    pad: int,
) -> Shard:
    """Writes rows, (ids, label) each, or (ids and texts' numbers, label), as shard `number` of one length. Fills up ids
    with `pad`, a label a token with IGNORED, and texts' numbers with 0. Raises BadInput for an id beyond the
    vocabulary; StorageError."""
    tokens = np.zeros((2, len(rows), length), np.int32)  # ids, texts' numbers
    tokens[0] = pad
    for row, (row_tokens, _) in enumerate(rows):
        tokens[: row_tokens.ndim, row, : row_tokens.shape[-1]] = row_tokens
    stored = [label for _, label in rows]
    if features[LABEL].shape == ["length"]:
        stored = [np.append(label, np.full(length - len(label), IGNORED)) for label in stored]
    labels = np.array(stored, features[LABEL].dtype)  # (n,), (n, labels) or (n, length)
    columns = {"input_ids": tokens[0], LABEL: labels, TYPES: tokens[1]}
    return dataset_writer.write_columns(url, plan, features, f"of{length}-{number:05d}", columns)
