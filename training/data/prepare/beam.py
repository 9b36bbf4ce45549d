"""`training.data.prepare.pack` as an Apache Beam pipeline, for corpora beyond one machine: it writes the same bytes.

    files --read--> batches of documents --tokenize--> ids of each batch
          ids --count--> where each batch begins in the one endless stream
          ids --cut at the borders of shards--> pieces by shard --join--> shards

Only the counts, one number for each batch of about 1 MB, are collected in one place. A worker holds one batch or one
shard. An interrupted run starts again from the beginning.

    tpu-train shards ... --runner DirectRunner \\
        --runner-option direct_num_workers=4 --runner-option direct_running_mode=multi_processing
    tpu-train shards ... --runner DataflowRunner \\
        --runner-option project=P --runner-option region=R --runner-option temp_location=gs://B/tmp \\
        --runner-option sdk_container_image=IMAGE --runner-option sdk_location=container

Dataflow's workers need this package and `tokenizers`: use the training image with apache-beam added (Beam's
documentation: "custom containers"). Needs the extra `beam`.

Failure model: a worker writes a file whole or not at all, and the same bytes when it writes again, so Beam may repeat
any step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from training import storage
from training.data.formats.dataset import Shard
from training.data.prepare import dataset_writer, pack
from training.data.prepare.corpus import Corpus, SplitFilter
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.pack import Encode, PackedDataset
from training.errors import BadInput

Key = tuple[int, int]  # number of the file, number of the batch in it
FOLDER = "beam"

EncoderFactory = Callable[[], Encode]


@dataclass(frozen=True)
class Totals:
    """The position of each batch's first id in the stream, and the number of all ids."""

    starts: dict[Key, int]
    tokens: int


def pack_documents(
    url: str,
    plan: DatasetPlan,
    corpus: Corpus,
    split: SplitFilter,
    encoder: EncoderFactory,
    *,
    runner: str,
    options: Sequence[str],
    overwrite: bool = False,
) -> PackedDataset:
    """Runs `pack.pack_documents` on a Beam runner, with `options` (KEY=VALUE) for the runner, and waits for its end.
    Returns a complete dataset of the same plan as it is.

    `split` selects the documents of the dataset. `encoder` must be picklable; each worker process calls it once. Raises
    BadInput without Apache Beam, and the errors of `pack.pack_documents`.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError:
        raise BadInput("--runner needs Apache Beam: pip install 'tpu-launch[beam]'") from None
    existing = dataset_writer.find_existing(url, plan, overwrite)
    if existing is not None:
        return PackedDataset(existing, 0, 0, reused=True)
    dataset_writer.begin_dataset(url, plan)
    pipeline_options = PipelineOptions([f"--runner={runner}", *(f"--{option}" for option in options)])
    with beam.Pipeline(options=pipeline_options) as pipeline:
        batches = (
            pipeline
            | "files" >> beam.Create(list(enumerate(corpus.files())))
            | "read" >> beam.FlatMap(read_batches, corpus.field, split)
            | "spread" >> beam.Reshuffle()
        )
        # Reshuffle again, so that counting and cutting use the same tokenized batches.
        encoded = batches | "tokenize" >> beam.Map(tokenize, encoder) | "keep" >> beam.Reshuffle()
        counts = encoded | "count" >> beam.Map(count)
        totals = pipeline | "one" >> beam.Create([url]) | "add up" >> beam.Map(add_up, beam.pvalue.AsIter(counts))
        (
            encoded
            | "cut" >> beam.FlatMap(cut, plan, beam.pvalue.AsSingleton(totals))
            | "join" >> beam.GroupByKey()
            | "write" >> beam.Map(write, url, plan)
        )
    return _finish(url, plan)


def read_batches(file: tuple[int, str], field: str, split: SplitFilter) -> Iterator[tuple[Key, list[str]]]:
    """Yields (file's, batch's number) and the texts of each batch of one file, (number, name), that `split` holds."""
    number, name = file
    documents = (text for text in Corpus(name, field).documents() if split.holds(text))
    for batch_number, batch in enumerate(pack.batches_of(documents)):
        yield (number, batch_number), batch


def tokenize(batch: tuple[Key, list[str]], encoder: EncoderFactory) -> tuple[Key, bytes, int]:
    """Returns the key of a batch, its ids as little-endian int32, and the number of its documents."""
    key, texts = batch
    ids = np.concatenate(_encode(encoder)(texts)).astype("<i4")
    return key, ids.tobytes(), len(texts)


def count(encoded: tuple[Key, bytes, int]) -> tuple[Key, int, int]:
    """Returns the key of a batch, and how many ids and documents it has."""
    key, ids, documents = encoded
    return key, len(ids) // 4, documents


def add_up(url: str, counts: Iterable[tuple[Key, int, int]]) -> Totals:
    """Returns where each batch begins, in the order of file and batch. Writes the totals to `.preparing/` for the
    driver."""
    starts: dict[Key, int] = {}
    tokens = documents = 0
    for key, ids, texts in sorted(counts):
        starts[key] = tokens
        tokens += ids
        documents += texts
    storage.write(
        storage.join(url, dataset_writer.PREPARING, FOLDER, "totals.json"), json.dumps([tokens, documents]).encode()
    )
    return Totals(starts, tokens)


def cut(encoded: tuple[Key, bytes, int], plan: DatasetPlan, totals: Totals) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Yields a batch's pieces by shard, (shard, (offset in the stream, ids)), without the tail that fills no row."""
    key, ids, _ = encoded
    per_shard, start = plan.records_per_shard * plan.length, totals.starts[key]
    stop = min(start + len(ids) // 4, totals.tokens // plan.length * plan.length)
    offset = start
    while offset < stop:
        end = min(stop, (offset // per_shard + 1) * per_shard)
        yield offset // per_shard, (offset, ids[4 * (offset - start) : 4 * (end - start)])
        offset = end


def write(pieces: tuple[int, Iterable[tuple[int, bytes]]], url: str, plan: DatasetPlan) -> None:
    """Joins the pieces of a shard by their offsets and writes it, and its manifest entry for the driver."""
    number, parts = pieces
    ids = np.frombuffer(b"".join(data for _, data in sorted(parts)), "<i4").astype(np.int32)
    shard = dataset_writer.shard_writer(plan)(url, number, ids.reshape(-1, plan.length))
    entry = json.dumps([number, shard.model_dump()]).encode()
    storage.write(storage.join(url, dataset_writer.PREPARING, FOLDER, f"{number}.json"), entry)


def _finish(url: str, plan: DatasetPlan) -> PackedDataset:
    """Commits the dataset from the entries and totals that the workers wrote. Raises BadInput if no row is full."""
    folder = storage.join(url, dataset_writer.PREPARING, FOLDER)
    tokens, documents = json.loads(storage.read(storage.join(folder, "totals.json")))
    pack.refuse_empty(url, plan, tokens, documents)
    count = -(-(tokens // plan.length) // plan.records_per_shard)
    shards = []
    for number in range(count):
        stored_number, shard = json.loads(storage.read(storage.join(folder, f"{number}.json")))
        assert stored_number == number
        shards.append(Shard.model_validate(shard))
    dataset = dataset_writer.finish_dataset(url, plan, dataset_writer.plan_features(plan), shards)
    return PackedDataset(dataset, documents, tokens % plan.length)


@lru_cache(maxsize=1)
def _encode(encoder: EncoderFactory) -> Encode:
    """Returns the factory's encoder, cached per process: loading a tokenizer takes longer than encoding a batch."""
    return encoder()
