"""`tpu-train dataset ...`: looks at datasets."""

from __future__ import annotations

import click

from training.data import tokenizer as tokenizers
from training.data.formats.open_dataset import open_dataset
from training.data.formats.verify import problems
from training.errors import BadInput


@click.group()
def dataset() -> None:
    """Look at datasets."""


@dataset.command()
@click.argument("url", metavar="PATH")
def show(url: str) -> None:
    """Print what a dataset's manifest says."""
    opened = open_dataset(url)
    manifest, shards = opened.manifest, opened.shards
    size = sum(shard.bytes for shard in shards) / 1e6
    features = ", ".join(f"{name} {feature.dtype}" for name, feature in manifest.features.items())
    click.echo(f"{url}: {manifest.kind}, {manifest.split} split, hash {opened.hash[:12]}")
    click.echo(
        f"  {opened.records} records of up to {opened.sequence_length} tokens in {len(shards)} shards, {size:.1f} MB"
    )
    click.echo(f"  features   {features}")
    if manifest.labels:
        names = ", ".join(manifest.labels[:8]) + (", ..." if len(manifest.labels) > 8 else "")
        click.echo(f"  labels     {len(manifest.labels)}: {names}")
    click.echo(f"  tokenizer  hash {opened.tokenizer_hash[:12]}, {manifest.vocabulary} ids")
    for shard in shards:
        click.echo(f"  {shard.name}  {shard.records} records  {shard.bytes} bytes  crc32c {shard.crc32c:08x}")


@dataset.command()
@click.argument("url", metavar="PATH")
@click.option("--tokenizer", "tokenizer_url", metavar="FOLDER", help="Also check that this tokenizer wrote it.")
def verify(url: str, tokenizer_url: str | None) -> None:
    """Read every record of a dataset and say everything that is wrong; exit code 2 if anything is."""
    opened = open_dataset(url)
    vocabulary = None
    if tokenizer_url is not None:
        tokenizer = tokenizers.read(tokenizer_url)
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
@click.option("--tokenizer", "tokenizer_url", required=True, metavar="FOLDER", help="The tokenizer that wrote it.")
@click.option(
    "--rows", "count", type=click.IntRange(min=1), default=3, show_default=True, help="How many rows of the batch."
)
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="Which batch.")
@click.option("--global-batch-size", type=click.IntRange(min=1), default=256, show_default=True, help="As in the run.")
@click.option("--seed", type=int, default=0, show_default=True, help="As in the run.")
@click.option(
    "--percent", type=click.IntRange(1, 100), default=15, show_default=True, help="How many tokens are to be predicted."
)
@click.option(
    "--run", metavar="FOLDER", help="A run's folder: take records in the order of its checkpoints. [default: a new run]"
)
def preview(
    url: str,
    tokenizer_url: str,
    count: int,
    step: int,
    global_batch_size: int,
    seed: int,
    percent: int,
    run: str | None,
) -> None:
    """Show rows of a training batch as text, with their masks or labels: the very ones that a run with this seed
    sees."""
    from training.checkpoint.admin import newest_manifest
    from training.data.loading.host_slice import HostSlice
    from training.data.loading.preview import preview_batch
    from training.data.sampling.order import ORDER_VERSION, version_of

    order_version = ORDER_VERSION if run is None else version_of(newest_manifest(run).identity)
    tokenizer, opened = tokenizers.read(tokenizer_url), open_dataset(url)
    opened.require(tokenizer_hash=tokenizer.hash)
    host_slice = HostSlice(tokenizer.special, global_batch_size, order_version=order_version)
    for line in preview_batch(opened, tokenizer, step, count, host_slice, seed=seed, percent=percent):
        click.echo(line)
