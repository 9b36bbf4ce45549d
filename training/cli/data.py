"""The commands of `tpu-train` that make data and look at it: tokenizer, shards, dataset."""

import sys
import time
from typing import Any, cast

import click

from training.cli import option
from training.data import tokenizer as tokenizers
from training.data.formats.open_dataset import open_dataset
from training.data.formats.verify import problems
from training.data.prepare.corpus import KINDS, Corpus
from training.data.prepare.dataset_writer import WrittenDataset
from training.data.prepare.make_datasets import SPLITS, DatasetOptions, make_datasets
from training.data.prepare.pack import PackingProgress
from training.data.prepare.tokenizer_training import Algorithm, train_tokenizer, write_tokenizer
from training.errors import BadInput
from training.registry import TASKS
from training.telemetry.console import Console

CORPUS = f"builtin:pydoc, a file or folder ({' '.join(KINDS)}; local or gs://), or datasets:NAME[:CONFIG[:SPLIT]]"
_PERCENT = click.FloatRange(0, 100)
_field_option = option(
    "--field",
    default="text",
    help="The column or key that holds the text, or its words, for .jsonl, .csv, .parquet and datasets.",
)


@click.command()
@option(
    "--corpus",
    "corpora",
    required=True,
    multiple=True,
    help=f"Text to learn from: {CORPUS}. May be given several times.",
)
@_field_option
@option("--vocabulary", type=click.IntRange(min=10), default=32_000, help="Number of token ids.")
@option(
    "--algorithm",
    type=click.Choice(["unigram", "wordpiece"]),
    default="unigram",
    help="unigram: as sentencepiece's; wordpiece: as BERT's.",
)
@option("--out", required=True, metavar="FOLDER", help="Folder to write: local or gs://bucket/folder.")
@option("--overwrite", is_flag=True, help="Replace another tokenizer that is there.")
def tokenizer(corpora: tuple[str, ...], field: str, vocabulary: int, algorithm: str, out: str, overwrite: bool) -> None:
    """Train a tokenizer and write it as a Hugging Face tokenizer folder; nothing changes if the same one is there.

    \b
    tpu-train tokenizer --corpus builtin:pydoc --vocabulary 2000 --out gs://my-bucket/tokenizer
    """
    sources = [Corpus(corpus, field) for corpus in corpora]
    content = train_tokenizer(
        lambda: (text for source in sources for text in source.documents()), vocabulary, cast(Algorithm, algorithm)
    )
    if not write_tokenizer(out, content, overwrite=overwrite):
        click.echo(f"{out}: this very tokenizer is already there; nothing to do")
        return
    written = tokenizers.read(out)
    ids = written.special.vocabulary
    fewer = "" if ids == vocabulary else f" (the text gives no more than that, of --vocabulary {vocabulary})"
    click.echo(f"{out}: {algorithm} tokenizer of {ids} ids{fewer}, hash {written.hash[:12]}")


@click.command()
@option("--corpus", required=True, help=f"The text: {CORPUS}.")
@option("--evaluation-corpus", help="Text of the evaluation split; --corpus is then all training.")
@option("--evaluation-percent", type=_PERCENT, default=5.0, help="Without it: this part of the documents.")
@_field_option
@option("--tokenizer", required=True, metavar="FOLDER", help="A tokenizer folder, local or gs://.")
@option("--sequence-length", type=click.IntRange(8, 1 << 16), default=128, help="Tokens a row.")
@option(
    "--task",
    type=click.Choice(list(TASKS)),
    default="mlm",
    help=(
        "classification, regression: one text, or two, and the label a row, from .csv, .tsv, .jsonl, .parquet or "
        "datasets; "
        "multi-label: a text and a list of labels; token-classification: a list of words and one of their labels, also "
        "from .conll; causal-lm: whole documents."
    ),
)
@option(
    "--chat",
    metavar="KEY",
    help=(
        "causal-lm: the column or key that holds a chat, a list of messages with role and content; the tokenizer's "
        "chat template renders it, and only answers are learnt."
    ),
)
@option("--label", default="label", help="Labelled rows: the column or key that holds the label or labels.")
@option("--text-pair", metavar="KEY", help="Rows of two texts: the column or key that holds the second one.")
@option(
    "--labels",
    metavar="FILE",
    help="Classifications: a JSON list of all labels in their order (default: those of --corpus, sorted).",
)
@option(
    "--lengths",
    metavar="N,N,...",
    help="Labelled rows: lengths of rows, the last one is --sequence-length (default: halves of it down to 16).",
)
@option(
    "--split",
    "splits",
    type=click.Choice(["train", "evaluation"]),
    multiple=True,
    help="Write only this split (default: both).",
)
@option("--records-per-shard", type=click.IntRange(min=1), help="Rows a shard (default: shards of about 64 MB).")
@option(
    "--layout",
    type=click.Choice(["compact", "recipe"]),
    default="compact",
    help=(
        "recipe: int64 input_ids and attention_mask in <split>-<i>-<count>.tfrecord, for other programs; larger and "
        "slower."
    ),
)
@option(
    "--out",
    required=True,
    metavar="FOLDER",
    help="Splits go to FOLDER/train and FOLDER/evaluation; local or gs://bucket/folder.",
)
@option("--overwrite", is_flag=True, help="Replace another dataset, or a damaged one, that is there.")
def shards(splits: tuple[str, ...], **options: Any) -> None:
    """Tokenize a corpus and write TFRecord datasets of a task.

    After an interruption, run it again: it continues where it stopped. It does nothing to a finished dataset
    of the same settings, and refuses another one without --overwrite.

    \b
    tpu-train shards --corpus builtin:pydoc --tokenizer gs://b/tokenizer --sequence-length 128 --out gs://b/data
    tpu-train shards --task classification --corpus train.csv --evaluation-corpus test.csv --label category \\
        --tokenizer gs://b/tokenizer --sequence-length 64 --out gs://b/data
    tpu-train shards --task classification --corpus train.tsv --field premise --text-pair hypothesis \\
        --tokenizer gs://b/tokenizer --sequence-length 128 --out gs://b/data
    tpu-train shards --task token-classification --corpus datasets:ORG/NAME --field tokens --label ner_tags \\
        --tokenizer gs://b/tokenizer --out gs://b/data
    tpu-train shards --task causal-lm --chat messages --corpus chats.jsonl --tokenizer ORGANISATION/NAME \\
        --sequence-length 2048 --out gs://b/data
    """
    for result in make_datasets(DatasetOptions(splits=splits or SPLITS, **options), _ProgressLine()):
        click.echo(_format_result(result))


def _format_result(result: WrittenDataset) -> str:
    """Returns the line for the user about a dataset that was written, or was there already."""
    dataset = result.dataset
    if result.reused:
        return f"{dataset.url}: this very dataset is already there ({dataset.records} records); nothing to do"
    size = sum(shard.bytes for shard in dataset.shards)
    lengths = sorted({shard.length for shard in dataset.shards})
    tokens = " or ".join(map(str, lengths))
    return (
        f"{dataset.url}: {dataset.records} records of {tokens} tokens in {len(dataset.shards)} shards, "
        f"{size / 1e6:.1f} MB; {result.note}"
    )


class _ProgressLine:
    """Prints progress on standard error: in place on a terminal, elsewhere a line every 10 s."""

    def __init__(self) -> None:
        self._began = self._printed = time.monotonic()
        self._console, self._pause = Console(True, sys.stderr), 0.2 if sys.stderr.isatty() else 10

    def __call__(self, url: str, progress: PackingProgress) -> None:
        """Prints the counts of `url` so far, unless the last line is too recent."""
        now = time.monotonic()
        if now - self._printed < self._pause:
            return
        self._printed = now
        counts = f"{progress.documents} documents, {progress.records} records, {progress.shards} shards"
        self._console.progress(f"{url}: {counts}, {now - self._began:.0f} s")


@click.group()
def dataset() -> None:
    """Look at datasets."""


@dataset.command()
@click.argument("url", metavar="PATH")
def show(url: str) -> None:
    """Print a summary of a dataset's manifest, the parts of a mixture, and a line for each shard."""
    opened = open_dataset(url)
    manifest, shards = opened.manifest, opened.shards
    size, length = sum(shard.bytes for shard in shards) / 1e6, opened.sequence_length
    features = ", ".join(f"{name} {feature.dtype}" for name, feature in manifest.features.items())
    click.echo(f"{url}: {manifest.rows} rows, {manifest.split} split, hash {opened.hash[:12]}")
    click.echo(f"  {opened.records} records of up to {length} tokens in {len(shards)} shards, {size:.1f} MB")
    click.echo(f"  features   {features}")
    if manifest.labels:
        names = ", ".join(manifest.labels[:8]) + (", ..." if len(manifest.labels) > 8 else "")
        click.echo(f"  labels     {len(manifest.labels)}: {names}")
    click.echo(f"  tokenizer  hash {manifest.tokenizer_hash[:12]}, {manifest.vocabulary} ids")
    for part in manifest.origin.get("mixture", ()):
        click.echo(f"  part       {part['times']} x {part['url']}, {part['records']} records, hash {part['hash'][:12]}")
    for shard in shards:
        click.echo(f"  {shard.name}  {shard.records} records  {shard.bytes} bytes  crc32c {shard.crc32c:08x}")


@dataset.command()
@option(
    "--part",
    "parts",
    multiple=True,
    required=True,
    metavar="FOLDER=TIMES",
    help="A dataset, and how often an epoch has each of its records. Give two or more.",
)
@option("--out", required=True, metavar="FOLDER", help="Folder to write: local or gs://bucket/folder.")
def mix(parts: tuple[str, ...], out: str) -> None:
    """Write a dataset that is a weighted mixture of others: a list of their shards, which runs read where they are.

    \b
    tpu-train dataset mix --part gs://b/web/train=1 --part gs://b/books/train=3 --out gs://b/mixed/train
    """
    from training.data.prepare.dataset_writer import parse_part, write_mixture

    times = dict(map(parse_part, parts))
    if len(times) < len(parts):
        raise BadInput("--part names a folder twice: give it once, with the number of times that an epoch has it")
    mixture = write_mixture(out, times)
    for part in mixture.manifest.origin["mixture"]:
        share = part["times"] * part["records"] / mixture.records
        click.echo(f"{part['url']}: {part['records']} records, {part['times']} times, {share:.1%} of an epoch")
    click.echo(f"{out}: {mixture.records} records")


@dataset.command()
@click.argument("url", metavar="PATH")
@option("--tokenizer", "tokenizer_url", metavar="FOLDER", help="Also check that this tokenizer wrote it.")
def verify(url: str, tokenizer_url: str | None) -> None:
    """Read every record of a dataset, not a mixture, and print all problems; exits with 2 if there are any."""
    opened = open_dataset(url)
    vocabulary = None
    if tokenizer_url is not None:
        tokenizer = tokenizers.read(tokenizer_url, opened.manifest.rows)
        vocabulary = tokenizer.special.vocabulary
        opened.require(tokenizer_hash=tokenizer.hash)
    count = 0
    for problem in problems(opened, vocabulary):
        count += 1
        click.echo(problem)
    if count:
        raise BadInput(f"{url}: {count} problem{'s' if count > 1 else ''}")
    click.echo(f"{url}: {opened.records} records in {len(opened.shards)} shards are as they were written")


@dataset.command()
@click.argument("url", metavar="PATH")
@option("--tokenizer", "tokenizer_url", required=True, metavar="FOLDER", help="The tokenizer that wrote it.")
@option("--rows", "count", type=click.IntRange(min=1), default=3, help="Number of rows to show.")
@option("--step", type=click.IntRange(min=0), default=0, help="Step whose batch to show.")
@option("--global-batch-size", type=click.IntRange(min=1), default=256, help="As in the run.")
@option("--seed", type=int, default=0, help="As in the run.")
@option("--percent", type=click.IntRange(1, 100), default=15, help="How many tokens are to be predicted.")
def preview(url: str, tokenizer_url: str, count: int, step: int, global_batch_size: int, **options: int) -> None:
    """Show the first rows of a step's batch as text, with masks or labels, as a run with this batch size, seed and
    percentage of masks gets them."""
    from training.data.loading.preview import preview_batch
    from training.data.loading.record_source import HostSlice

    opened = open_dataset(url)
    tokenizer = tokenizers.read(tokenizer_url, opened.manifest.rows)
    opened.require(tokenizer_hash=tokenizer.hash)
    host_slice = HostSlice(tokenizer.special, global_batch_size)
    for line in preview_batch(opened, tokenizer, step, count, host_slice, **options):
        click.echo(line)
