"""Claims about the Beam pipeline, to be run where apache-beam and tokenizers are: several workers write what the local
path writes, byte for byte."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from training import storage
from training.data import tokenizer as tokenizers
from training.data.prepare import beam as pipeline
from training.data.prepare import dataset_writer, pack
from training.data.prepare.corpus import Corpus, SplitFilter
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.pack import pack_documents
from training.data.prepare.tokenizer_training import train_tokenizer
from training.errors import BadInput

SEVERAL = ("direct_num_workers=2", "direct_running_mode=multi_processing")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    for name, content in tokenizers.files(train_tokenizer(Corpus("builtin:pydoc").documents, 600, "unigram")).items():
        storage.write(storage.join(folder, name), content)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Three files, the second of which is empty."""
    folder, texts = tmp_path_factory.mktemp("corpus"), list(Corpus("builtin:pydoc").documents())
    (folder / "a.txt").write_text("\n\n".join(texts[:50]))
    (folder / "b.txt").write_text("")
    (folder / "c.txt").write_text("\n\n".join(texts[50:]))
    return Corpus(str(folder))


def plan(tokenizer: str, **changes: Any) -> DatasetPlan:
    loaded = tokenizers.read(tokenizer)
    return DatasetPlan(
        **{
            "split": "train",
            "length": 64,
            "tokenizer_hash": loaded.hash,
            "vocabulary": 600,
            "records_per_shard": 300,
            **changes,
        }
    )


def content(folder: Path) -> dict[str, bytes]:
    return {stat.url.removeprefix(str(folder)): storage.read(stat.url) for stat in storage.listing(str(folder))}


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"layout": "recipe"}])
@pytest.mark.parametrize("workers", [(), SEVERAL])
def test_the_shards_are_those_of_the_local_path(
    tmp_path: Path,
    tokenizer: str,
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    workers: tuple[str, ...],
) -> None:
    monkeypatch.setattr(pack, "BATCH_CHARACTERS", 1 << 14)
    part, wanted = SplitFilter("train", 10.0), plan(tokenizer, **options)
    local = pack_documents(
        str(tmp_path / "local"),
        wanted,
        lambda: filter(part.holds, corpus.documents()),
        tokenizers.encoder_of(tokenizer),
    )
    encoder = partial(tokenizers.encoder_of, tokenizer)
    beam = pipeline.pack_documents(
        str(tmp_path / "beam"), wanted, corpus, part, encoder, runner="DirectRunner", options=workers
    )
    assert content(tmp_path / "beam") == content(tmp_path / "local")
    assert (beam.documents, beam.dropped) == (local.documents, local.dropped)
    assert len(beam.dataset.shards) > 3
    assert not (tmp_path / "beam" / dataset_writer.PREPARING).exists()


def test_a_finished_dataset_is_reused_and_too_little_text_is_an_error(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    encoder = partial(tokenizers.encoder_of, tokenizer)
    run = partial(
        pipeline.pack_documents,
        corpus=Corpus(str(tmp_path / "a.txt")),
        split=SplitFilter("train", None),
        encoder=encoder,
        runner="DirectRunner",
        options=(),
    )
    with pytest.raises(BadInput, match=r"the train split has \d+ tokens in 2 documents, less than one row of 64"):
        run(str(tmp_path / "out"), plan(tokenizer))
    assert not run(str(tmp_path / "out"), plan(tokenizer, length=2), overwrite=True).reused
    assert run(str(tmp_path / "out"), plan(tokenizer, length=2)).reused
