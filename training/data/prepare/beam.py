"""The work of `training.data.prepare.pack` as an Apache Beam pipeline, for corpora beyond one machine. The shards are
the same, byte for byte.

    files --read--> batches of documents --tokenize--> ids of each batch --count--> where each batch begins in the one
    endless stream
                                                                \\--cut at the borders of shards--> pieces by shard
                                                                --join--> shards

Only the counts, one number for each batch of about 1 MB, come together in one place. A worker holds one batch or one
shard. What is written by a worker is whole or not at all, and the same when it is written again, so Beam may repeat any
step. Runs that end early start again from the beginning.

    tpu-train shards ... --runner DirectRunner --runner-option direct_num_workers=4 --runner-option
    direct_running_mode=multi_processing tpu-train shards ... --runner DataflowRunner --runner-option project=P
    --runner-option region=R --runner-option temp_location=gs://B/tmp \\
        --runner-option sdk_container_image=IMAGE --runner-option sdk_location=container

Dataflow's workers need this package and `tokenizers`: give the training image with apache-beam added (its
documentation: "custom containers"). Needs the extra `beam`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from training import storage
from training.data.formats.dataset import Shard
from training.data.prepare import pack as prepare
from training.data.prepare.corpus import Corpus, Part
from training.errors import BadInput

Key = tuple[int, int]  # number of the file, number of the batch in it
FOLDER = "beam"

EncoderOf = Callable[[], prepare.Encode]


@dataclass(frozen=True)
class Totals:
    """Where each batch's ids begin in the stream, and how much there is in all."""

    starts: dict[Key, int]
    tokens: int
    documents: int


def make(
    url: str,
    plan: prepare.Plan,
    corpus: Corpus,
    part: Part,
    encoder: EncoderOf,
    *,
    runner: str,
    options: Sequence[str],
    overwrite: bool = False,
) -> prepare.Made:
    """As `prepare.make`. `encoder` is called on each worker and must be picklable. Raises BadInput, StorageError."""
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError:
        raise BadInput("--runner needs Apache Beam: pip install 'tpu-launch[beam]'") from None
    done = prepare.existing(url, plan, overwrite)
    if done is not None:
        return prepare.Made(done, 0, 0, reused=True)
    prepare.begin(url, plan)
    given = PipelineOptions([f"--runner={runner}", *(f"--{option}" for option in options)])
    with beam.Pipeline(options=given) as pipeline:
        batches = (
            pipeline
            | "files" >> beam.Create(list(enumerate(corpus.files())))
            | "read" >> beam.FlatMap(read_batches, corpus.field, part)
            | "spread" >> beam.Reshuffle()
        )
        # Reshuffled again, so that counting and cutting share what tokenizing gave.
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


def read_batches(file: tuple[int, str], field: str, part: Part) -> Iterator[tuple[Key, list[str]]]:
    """The batches of documents of one file."""
    number, name = file
    documents = (text for text in Corpus(name, field).documents() if part.holds(text))
    for place, batch in enumerate(prepare.batches_of(documents)):
        yield (number, place), batch


def tokenize(batch: tuple[Key, list[str]], encoder: EncoderOf) -> tuple[Key, bytes, int]:
    """The ids of a batch, as little-endian int32, and how many documents it had."""
    key, texts = batch
    ids = np.concatenate(_encode(encoder)(texts)).astype("<i4")
    return key, ids.tobytes(), len(texts)


def count(encoded: tuple[Key, bytes, int]) -> tuple[Key, int, int]:
    """Ids and documents of a batch."""
    key, ids, documents = encoded
    return key, len(ids) // 4, documents


def add_up(url: str, counts: Iterable[tuple[Key, int, int]]) -> Totals:
    """Where each batch begins: batches follow each other by file and place. Notes the totals for the driver."""
    starts: dict[Key, int] = {}
    tokens = documents = 0
    for key, ids, texts in sorted(counts):
        starts[key] = tokens
        tokens += ids
        documents += texts
    storage.write(storage.join(url, prepare.PREPARING, FOLDER, "totals.json"), json.dumps([tokens, documents]).encode())
    return Totals(starts, tokens, documents)


def cut(encoded: tuple[Key, bytes, int], plan: prepare.Plan, totals: Totals) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """The pieces of a batch by shard: (shard, (where in the stream, ids)). The tail that fills no row is left out."""
    key, ids, _ = encoded
    per_shard, start = plan.records_per_shard * plan.length, totals.starts[key]
    stop = min(start + len(ids) // 4, totals.tokens // plan.length * plan.length)
    place = start
    while place < stop:
        end = min(stop, (place // per_shard + 1) * per_shard)
        yield place // per_shard, (place, ids[4 * (place - start) : 4 * (end - start)])
        place = end


def write(pieces: tuple[int, Iterable[tuple[int, bytes]]], url: str, plan: prepare.Plan) -> None:
    """One shard from its pieces, and a note of it for the driver."""
    number, parts = pieces
    ids = np.frombuffer(b"".join(data for _, data in sorted(parts)), "<i4").astype(np.int32)
    shard = prepare.writer(plan)(url, number, ids.reshape(-1, plan.length))
    note = json.dumps([number, shard.model_dump()]).encode()
    storage.write(storage.join(url, prepare.PREPARING, FOLDER, f"{number}.json"), note)


def _finish(url: str, plan: prepare.Plan) -> prepare.Made:
    folder = storage.join(url, prepare.PREPARING, FOLDER)
    tokens, documents = json.loads(storage.read(storage.join(folder, "totals.json")))
    prepare.refuse_empty(url, plan, tokens, documents)
    wanted = -(-(tokens // plan.length) // plan.records_per_shard)
    shards = []
    for number in range(wanted):
        found, shard = json.loads(storage.read(storage.join(folder, f"{number}.json")))
        assert found == number
        shards.append(Shard.model_validate(shard))
    return prepare.Made(prepare.finish(url, plan, prepare.columns(plan), shards), documents, tokens % plan.length)


_encoders: dict[Any, prepare.Encode] = {}


def _encode(encoder: EncoderOf) -> prepare.Encode:
    """One for each process: loading a tokenizer takes longer than using it on a batch."""
    if encoder not in _encoders:
        _encoders[encoder] = encoder()
    return _encoders[encoder]
