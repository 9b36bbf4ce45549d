"""Makes one dataset for each split from the options of `tpu-train shards`.

Chooses the corpus, the plan and the writer of each split: packed rows or whole documents (`pack`), or labelled rows
(`labelled_rows`), which describe their failure models.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

from training import storage
from training.data import tokenizer as tokenizers
from training.data.formats.dataset import Layout, Rows
from training.data.prepare import dataset_writer, pack
from training.data.prepare.corpus import Corpus, is_in_split
from training.data.prepare.dataset_writer import DatasetPlan, WrittenDataset
from training.data.prepare.labelled_rows import (
    LabelKind,
    LabelledText,
    default_lengths,
    label_mistake,
    select_columns,
    write_labelled_rows,
)
from training.data.prepare.pack import PackingProgress, WholeChats, WholeDocuments, chats, open_template
from training.data.tokenizer import Encode, Tokenizer
from training.errors import BadInput
from training.registry import TASKS, TaskName

SPLITS = ("train", "evaluation")
UNLABELLED = ("packed", "documents")


@dataclass(frozen=True)
class DatasetOptions:
    """The options of `tpu-train shards`."""

    corpus: str
    tokenizer: str
    out: str  # splits are written to <out>/train and <out>/evaluation
    task: TaskName = "mlm"  # decides which rows are written
    chat: str | None = None  # the column or key that holds the messages of a chat; None: the rows are documents
    evaluation_corpus: str | None = None  # text of the evaluation split; `corpus` is then all training
    evaluation_percent: float = 5.0  # without an evaluation corpus, the share of documents for evaluation
    field: str = "text"  # the column or key that holds the text
    sequence_length: int = 128
    label: str = "label"  # the column or key that holds the label
    text_pair: str | None = None  # that of the second text of labelled rows; None: a row has one
    labels: str | None = None  # URL of a JSON list of all class names; None: those of `corpus`, sorted
    lengths: str | None = None  # of labelled rows, "N,N,...", ascending; None: halves of the sequence length
    splits: tuple[str, ...] = SPLITS
    records_per_shard: int | None = None  # None: shards of about 64 MB
    layout: Layout = "compact"
    overwrite: bool = False

    @cached_property
    def corpora(self) -> dict[str, Corpus]:
        """Returns split -> corpus. Without an evaluation corpus both are one object, so that it is hashed once and both
        splits read one revision of it."""
        label = None if TASKS[self.task].rows in UNLABELLED else self.label
        field, other = self.chat or self.field, self.evaluation_corpus
        train = Corpus(self.corpus, field, label, self.text_pair)
        return {"train": train, "evaluation": train if other is None else replace(train, name=other)}

    @property
    def percent(self) -> float | None:
        """Returns the percentage of documents for evaluation, for `is_in_split`; None with an evaluation corpus."""
        return self.evaluation_percent if self.evaluation_corpus is None else None


def make_datasets(
    options: DatasetOptions, progress: Callable[[str, PackingProgress], None] = lambda url, progress: None
) -> Iterator[WrittenDataset]:
    """Makes the dataset of each split in <out>/<split>, when its result is asked for, and yields it. Continues or keeps
    what is there, as `_make_unlabelled` and `_make_labelled`. Calls `progress` with the split's URL after each shard of
    unlabelled rows. Raises BadInput for options that contradict each other, a corpus or tokenizer that can't be read,
    or a folder that holds something else; and StorageError."""
    _check(options)
    tokenizer = tokenizers.read(options.tokenizer, TASKS[options.task].rows)
    encode = tokenizers.encoder(tokenizer)
    if TASKS[options.task].rows in UNLABELLED:
        for split in options.splits:
            yield _make_unlabelled(options, split, tokenizer, encode, progress)
        return
    lengths = parse_lengths(options.lengths, options.sequence_length)
    labels = _labels(options)
    for split in options.splits:
        yield _make_labelled(options, split, tokenizer, encode, lengths, labels)


def _check(options: DatasetOptions) -> None:
    """Raises BadInput for options that contradict each other."""
    rows = TASKS[options.task].rows
    if rows != "packed" and options.layout != "compact":
        raise BadInput(f"--task {options.task} has the compact layout only")
    if options.text_pair is not None and rows in (*UNLABELLED, "token-labelled"):
        raise BadInput(f"--text-pair is for tasks of whole texts, and --task {options.task} is none: leave it out")
    if options.chat is not None and rows != "documents":
        raise BadInput(f"--chat is for --task causal-lm, and --task {options.task} reads texts: leave it out")


def _plan(options: DatasetOptions, split: str, tokenizer: Tokenizer, **more: Any) -> DatasetPlan:
    """Returns the plan of a split; for the corpus's fingerprint reads local files or asks the Hub. `more`: keys of its
    origin. Raises BadInput, StorageError."""
    corpus, vocabulary = options.corpora[split], tokenizer.special.vocabulary
    return DatasetPlan(
        split=split,
        length=options.sequence_length,
        tokenizer_hash=tokenizer.hash,
        vocabulary=vocabulary,
        records_per_shard=options.records_per_shard
        or dataset_writer.records_per_shard(options.sequence_length, vocabulary),
        layout=options.layout,
        origin={
            "corpus": corpus.name,
            "field": corpus.field,
            "fingerprint": corpus.fingerprint,
            "evaluation_percent": options.percent,
            **more,
        },
    )


def _make_unlabelled(
    options: DatasetOptions,
    split: str,
    tokenizer: Tokenizer,
    encode: Encode,
    progress: Callable[[str, PackingProgress], None],
) -> WrittenDataset:
    """Makes one split of packed rows, or of rows of whole documents or chats; continues an interrupted one, and returns
    a complete one as it is. Calls `progress` with the split's URL after each shard. Raises BadInput, StorageError."""
    corpus = options.corpora[split]
    template = open_template(tokenizer.url) if options.chat else None
    origin: dict[str, Any] = {}
    if TASKS[options.task].rows == "documents":
        origin = {"rows": "documents", "chat_template": template and str(template.chat_template)}
    plan = _plan(options, split, tokenizer, **origin)
    kind: pack.RowKind = pack.PackedRows(plan, encode)
    if origin:
        kind = WholeChats(plan, tokenizer, template) if options.chat else WholeDocuments(plan, tokenizer, encode)
    url = storage.join(options.out, split)

    def documents() -> Iterable[str]:
        texts = chats(corpus) if options.chat else corpus.documents()
        return (text for text in texts if is_in_split(text, split, options.percent))

    return pack.write_rows(url, plan, documents, kind, overwrite=options.overwrite, progress=partial(progress, url))


def _make_labelled(
    options: DatasetOptions,
    split: str,
    tokenizer: Tokenizer,
    encode: Encode,
    lengths: tuple[int, ...],
    labels: LabelKind,
) -> WrittenDataset:
    """Makes one split of labelled rows, an interrupted one from its beginning, or returns it if it is complete.
    `encode`: for single texts; pairs and words have encoders of their own. Raises BadInput, StorageError."""
    corpus = options.corpora[split]
    own = corpus.label_names if labels.has_names else ()
    if labels.numbers or not set(own).isdisjoint(labels.names):  # --labels may have another order, or some of them
        labels = replace(labels, numbers=own)
    origin = {"label": options.label, "labels": list(labels.names), "lengths": list(lengths)}
    if labels.is_list:
        origin["rows"] = labels.rows
    if options.text_pair:
        origin["text_pair"] = options.text_pair
    plan = _plan(options, split, tokenizer, **origin)
    url = storage.join(options.out, split)

    def rows() -> Iterable[LabelledText]:
        columns = select_columns(corpus.rows(), options.field, options.label, corpus.name, labels, options.text_pair)
        joined = ((row, row[0] if isinstance(row[0], str) else " ".join(row[0])) for row in columns)
        return (row for row, text in joined if is_in_split(text, split, options.percent))

    pairs = tokenizers.PairEncoder(tokenizer, options.sequence_length) if options.text_pair else None
    encode_texts = tokenizers.word_encoder(tokenizer) if labels.rows == "token-labelled" else pairs or encode
    empty, full = encode(["", "a"])  # end alike if texts end with a special token; decoders' do not
    result = write_labelled_rows(
        url, plan, lengths, labels, rows, encode_texts, tokenizer.special.pad, has_pairs=pairs is not None,
        ends_special=empty.size > 0 and empty[-1] == full[-1], overwrite=options.overwrite,
    )  # fmt: skip
    if pairs is None:
        return result
    note = f"{pairs.cut} pairs of texts were longer than {options.sequence_length} tokens and were cut"
    return replace(result, note=note)


def parse_lengths(lengths: str | None, longest: int) -> tuple[int, ...]:
    """Parses --lengths, "N,N,..."; None gives `default_lengths`. Raises BadInput unless the numbers are 2 or more,
    ascend, and end in `longest`."""
    if lengths is None:
        return default_lengths(longest)
    try:
        numbers = tuple(int(number) for number in lengths.split(","))
    except ValueError:
        raise BadInput(f"--lengths {lengths}: expected numbers, for example 32,64,128") from None
    if list(numbers) != sorted(set(numbers)) or numbers[0] < 2 or numbers[-1] != longest:
        raise BadInput(
            f"--lengths {lengths}: expected ascending numbers that end in --sequence-length, which is {longest}"
        )
    return numbers


def _labels(options: DatasetOptions) -> LabelKind:
    """Returns how labels are stored, and classes' names: from --labels, else the training corpus's description, else
    all its rows, sorted. Raises BadInput for impossible names, or --labels with a regression; StorageError."""
    kind = LabelKind(cast(Rows, TASKS[options.task].rows))
    if not kind.has_names:
        if options.labels is not None:
            what = "the names of classes, and a --task regression label is a number"
            raise BadInput(f"--labels lists {what}: leave it out")
        return kind
    if options.labels is not None:
        return replace(kind, names=_read_names(options.labels))
    corpus = options.corpora["train"]
    if names := corpus.label_names:
        return replace(kind, names=names, numbers=names)
    columns = select_columns(corpus.rows(), corpus.field, options.label, corpus.name, kind)
    lists = (label if kind.is_list else [label] for _, label in columns)
    return replace(kind, names=tuple(sorted({name for names in lists for name in names})))


def _read_names(url: str) -> tuple[str, ...]:
    """Reads --labels, a JSON list of classes' names. Raises BadInput for impossible names; StorageError."""
    try:
        names = json.loads(storage.read(url))
    except storage.NotFound as error:
        raise BadInput(f"--labels: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--labels {url}: not JSON: {error}") from None
    are_texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not are_texts or not names or len(set(names)) < len(names):
        raise BadInput(f"--labels {url}: expected a JSON list of different strings")
    for name in names:
        if mistake := label_mistake(name):
            raise BadInput(f"--labels {url}: label {name!r:.80} {mistake}")
    return tuple(names)
