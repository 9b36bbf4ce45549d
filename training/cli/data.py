"""The commands of `tpu-train` that make data: tokenizer and shards."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, cast, get_args

import click

from training.data import tokenizer as tokenizers
from training.data.formats.dataset import Kind
from training.data.prepare.corpus import Corpus
from training.data.prepare.make_datasets import SPLITS, DatasetOptions, SplitResult, make_datasets
from training.data.prepare.pack import Progress
from training.data.prepare.tokenizer_training import Algorithm, train_tokenizer, write_tokenizer

CORPUS = (
    "builtin:pydoc, a file or folder (.txt .tokens .md .jsonl .ndjson .csv; local or gs://), or "
    "datasets:NAME[:CONFIG[:SPLIT]]"
)
_field_option = click.option(
    "--field",
    default="text",
    show_default=True,
    help="The column or key that holds the text, for .jsonl, .csv and datasets.",
)


@click.command()
@click.option(
    "--corpus",
    "corpora",
    required=True,
    multiple=True,
    help=f"Text to learn from: {CORPUS}. May be given several times.",
)
@_field_option
@click.option(
    "--vocabulary", type=click.IntRange(min=10), default=32_000, show_default=True, help="Number of token ids."
)
@click.option(
    "--algorithm",
    type=click.Choice(["unigram", "wordpiece"]),
    default="unigram",
    show_default=True,
    help="unigram: as sentencepiece's; wordpiece: as BERT's.",
)
@click.option(
    "--out", required=True, metavar="FOLDER", help="Where the tokenizer goes: a local folder or gs://bucket/folder."
)
@click.option("--overwrite", is_flag=True, help="Replace another tokenizer that is there.")
def tokenizer(corpora: tuple[str, ...], field: str, vocabulary: int, algorithm: str, out: str, overwrite: bool) -> None:
    """Train a tokenizer; the result is a Hugging Face tokenizer folder.

    \b
    tpu-train tokenizer --corpus builtin:pydoc --vocabulary 2000 --out gs://my-bucket/tokenizer
    """

    def documents() -> Iterator[str]:
        for corpus in corpora:
            yield from Corpus(corpus, field).documents()

    content = train_tokenizer(documents, vocabulary, cast(Algorithm, algorithm))
    if not write_tokenizer(out, content, overwrite=overwrite):
        click.echo(f"{out}: this very tokenizer is already there; nothing to do")
        return
    written = tokenizers.read(out)
    ids = written.special.vocabulary
    fewer = "" if ids == vocabulary else f" (the text gives no more than that, of --vocabulary {vocabulary})"
    click.echo(f"{out}: {algorithm} tokenizer of {ids} ids{fewer}, hash {written.hash[:12]}")


@click.command()
@click.option("--corpus", required=True, help=f"The text: {CORPUS}.")
@click.option("--evaluation-corpus", help="Text of the evaluation split; --corpus is then all training.")
@click.option(
    "--evaluation-percent",
    type=click.FloatRange(0, 100),
    default=5.0,
    show_default=True,
    help="Without it: this part of the documents.",
)
@_field_option
@click.option("--tokenizer", required=True, metavar="FOLDER", help="A tokenizer folder, local or gs://.")
@click.option(
    "--sequence-length", type=click.IntRange(8, 1 << 16), default=128, show_default=True, help="Tokens a row."
)
@click.option(
    "--task",
    type=click.Choice(get_args(Kind)),
    default="mlm",
    show_default=True,
    help="classification, regression: one text and its label a row, from .csv, .jsonl or datasets.",
)
@click.option(
    "--label", default="label", show_default=True, help="Labelled rows: the column or key that holds the label."
)
@click.option(
    "--labels",
    metavar="FILE",
    help="Classification: a JSON list of all labels in their order (default: those of --corpus, sorted).",
)
@click.option(
    "--lengths",
    metavar="N,N,...",
    help="Labelled rows: lengths of rows, the last one is --sequence-length (default: halves of it down to 16).",
)
@click.option(
    "--split",
    "splits",
    type=click.Choice(["train", "evaluation"]),
    multiple=True,
    help="Write only this split (default: both).",
)
@click.option("--records-per-shard", type=click.IntRange(min=1), help="Rows a shard (default: shards of about 64 MB).")
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip"]),
    default="none",
    show_default=True,
    help=(
        "gzip: about half the size, and half the speed of reading. Other programs need the setting "
        "(TensorFlow: compression_type='GZIP')."
    ),
)
@click.option(
    "--layout",
    type=click.Choice(["compact", "recipe"]),
    default="compact",
    show_default=True,
    help=(
        "recipe: int64 input_ids and attention_mask in <split>-<i>-<count>.tfrecord, for other programs; larger and "
        "slower."
    ),
)
@click.option(
    "--runner", metavar="NAME", help="Run as an Apache Beam pipeline: DirectRunner, DataflowRunner, ... (extra `beam`)."
)
@click.option(
    "--runner-option",
    "runner_options",
    metavar="KEY=VALUE",
    multiple=True,
    help="An option of that runner, for example region=us-central1.",
)
@click.option(
    "--out",
    required=True,
    metavar="FOLDER",
    help="Splits go to FOLDER/train and FOLDER/evaluation; local or gs://bucket/folder.",
)
@click.option("--overwrite", is_flag=True, help="Replace another dataset that is there.")
def shards(splits: tuple[str, ...], **options: Any) -> None:
    """Tokenize a corpus and write TFRecord datasets, for masked language modelling or for classification.

    Run again after an interruption, it goes on where it stopped; over the finished dataset it does nothing.

    \b
    tpu-train shards --corpus builtin:pydoc --tokenizer gs://b/tokenizer --sequence-length 128 --out gs://b/data
    tpu-train shards --task classification --corpus train.csv --evaluation-corpus test.csv --label category \\
        --tokenizer gs://b/tokenizer --sequence-length 64 --out gs://b/data
    """
    for result in make_datasets(DatasetOptions(splits=splits or SPLITS, **options), _ProgressLine()):
        click.echo(_format_result(result))


def _format_result(result: SplitResult) -> str:
    dataset = result.dataset
    if result.reused:
        return f"{result.url}: this very dataset is already there ({dataset.records} records); nothing to do"
    size = sum(shard.bytes for shard in dataset.shards)
    lengths = sorted({shard.length for shard in dataset.shards})
    tokens = " or ".join(map(str, lengths))
    return (
        f"{result.url}: {dataset.records} records of {tokens} tokens in {len(dataset.shards)} shards, "
        f"{size / 1e6:.1f} MB; {result.note}"
    )


class _ProgressLine:
    """Prints progress on standard error: on a terminal a line that changes in place, elsewhere a line each 10 s."""

    def __init__(self) -> None:
        self._began = self._printed = time.monotonic()
        self._in_place = sys.stderr.isatty()

    def __call__(self, url: str, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._printed < (0.2 if self._in_place else 10):
            return
        self._printed = now
        text = (
            f"{url}: {progress.documents} documents, {progress.records} records, {progress.shards} shards, "
            f"{now - self._began:.0f} s"
        )
        click.echo(f"\r{text}\x1b[K" if self._in_place else text, err=True, nl=not self._in_place)
