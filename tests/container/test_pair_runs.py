"""Rows of two texts: they are those of transformers' tokenizer, a network gets them, and a run learns from them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from tests.container import small_runs
from tests.container.small_runs import write_csv
from tests.container.test_classification_runs import document
from training.data import tokenizer as tokenizer_files
from training.data.formats.dataset import Dataset
from training.data.formats.open_dataset import open_dataset
from training.data.loading.batches import labelled_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare.make_datasets import DatasetOptions, make_datasets
from training.data.prepare.tokenizer_training import write_tokenizer
from training.errors import BadInput
from training.models.predict import classify
from training.registry import TASKS, load

LENGTH, COUNT = 16, 96
COLUMNS = {"field": "premise", "text_pair": "hypothesis", "label": "verdict"}


def corpus() -> list[dict[str, str]]:
    """Pairs of texts of words from either half of the vocabulary, the second's being the verdict; some are too long."""
    chance = random.Random(3)
    rows = []
    for number in range(COUNT):
        halves = (number % 2, (number % 2 + number // 2) % 2)
        sizes = ((3, 4), (5, 5), (14, 3), (2, 12), (12, 12), (1, 1))[number % 6]
        first, second = (
            " ".join(f"w{5 + 100 * half + chance.randrange(90)}" for _ in range(size))
            for half, size in zip(halves, sizes, strict=True)
        )
        rows.append({"premise": first, "hypothesis": second, "verdict": ("calm", "wild")[halves[1]]})
    return rows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pairs") / "tokenizer"
    small_runs.write_tokenizer(folder)
    content = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(token, content.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    content.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    write_tokenizer(str(folder), content.to_str().encode(), overwrite=True)
    return str(folder)


def make(out: Path, tokenizer: str, source: Path, **changes: Any) -> tuple[Dataset, str]:
    values = {"corpus": str(source), "task": "classification", "tokenizer": tokenizer, "out": str(out), **COLUMNS}
    options = {"sequence_length": LENGTH, "lengths": f"8,{LENGTH}", "evaluation_percent": 0.0, "splits": ("train",)}
    [result] = make_datasets(DatasetOptions(**{**values, **options, **changes}))
    return open_dataset(result.dataset.url), result.note


def test_rows_are_those_of_transformers_tokenizer_and_loss_is_that_of_its_model(tmp_path: Path, tokenizer: str) -> None:
    rows = corpus()
    dataset, note = make(tmp_path / "data", tokenizer, write_csv(tmp_path / "pairs.tsv", rows))
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    texts = [[row[name] for row in rows] for name in ("premise", "hypothesis")]
    whole = theirs(*texts, truncation="longest_first", max_length=LENGTH, return_token_type_ids=True)
    labels = [["calm", "wild"].index(row["verdict"]) for row in rows]
    expected = sorted(zip(whole["input_ids"], whole["token_type_ids"], labels, strict=True))
    tokens = tokenizer_files.read(tokenizer, "class-labelled").special
    found = []
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=small_runs.VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=LENGTH, pad_token_id=tokens.pad,
    )  # fmt: skip
    network = transformers.BertForSequenceClassification(config).eval()
    ours, total = 0.0, 0.0
    for batch in labelled_evaluation(dataset, HostSlice(tokens, 8)):
        for row in np.flatnonzero(batch.weights):
            used = batch.attention_mask[row] > 0
            assert not batch.token_type_ids[row][~used].any()
            values = (batch.input_ids[row], batch.token_type_ids[row])
            found.append((*(value[used].tolist() for value in values), int(batch.labels[row])))
        inputs = ("input_ids", "attention_mask", "token_type_ids")
        arrays = {name: torch.from_numpy(getattr(batch, name)) for name in (*inputs, "labels", "weights")}
        with torch.no_grad():
            sums, _ = load(TASKS["classification"].torch)(network, arrays)
            logits = network(**{name: arrays[name].long() for name in inputs}).logits
        losses = torch.nn.functional.cross_entropy(logits, arrays["labels"].long(), reduction="none")
        ours, total = ours + float(sums[0]), total + float((losses * arrays["weights"]).sum())
    assert sorted(found) == expected
    assert ours == pytest.approx(total, rel=1e-6)
    too_long = sum(len(ids) > LENGTH for ids in theirs(*texts)["input_ids"])
    assert note.startswith(f"{too_long} pairs of texts were longer")
    assert too_long > 0


def test_a_run_learns_from_pairs_and_its_model_predicts_them(tmp_path: Path, tokenizer: str) -> None:
    """The words of the second text decide, and those of the first say nothing."""
    rows = corpus()
    evaluated = rows[:24]  # each prediction below loads the model
    for split, part in (("train", rows), ("evaluation", evaluated)):
        make(tmp_path / split, tokenizer, write_csv(tmp_path / f"{split}.tsv", part))
    data = {split: str(tmp_path / split / "train") for split in ("train", "evaluation")} | {"tokenizer": tokenizer}
    summary = small_runs.train_here(document(tmp_path, data=data, train__steps=120), "pairs")
    assert summary["eval_loss"] < summary["first_loss"] / 2
    answers = [classify(summary["model"], row["premise"], 1, row["hypothesis"])[0].name for row in evaluated]
    right = [answer == row["verdict"] for answer, row in zip(answers, evaluated, strict=True)]
    assert np.mean(right) == pytest.approx(summary["eval_accuracy"])


def test_mistakes_about_pairs_are_one_line(tmp_path: Path, tokenizer: str) -> None:
    source = write_csv(tmp_path / "pairs.tsv", corpus())
    for changes, message in (
        ({"text_pair": "answer"}, r"pairs\.tsv:2 has no 'answer', it has: 'premise', 'hypothesis', 'verdict'"),
        ({"task": "mlm"}, "--text-pair is for tasks of whole texts, and --task mlm is none"),
        ({"sequence_length": 3, "lengths": "3"}, "has no room for text: a pair has 3 special tokens"),
    ):
        with pytest.raises(BadInput, match=message):
            make(tmp_path / "bad", tokenizer, source, **changes)
    make(tmp_path / "pairs", tokenizer, source)
    make(tmp_path / "single", tokenizer, source, text_pair=None)
    data = {"train": str(tmp_path / "pairs" / "train"), "tokenizer": tokenizer}
    data["evaluation"] = str(tmp_path / "single" / "train")
    message = r"has rows of one text, and .* of two texts: write both with the same --text-pair"
    with pytest.raises(BadInput, match=message):
        small_runs.train_here(document(tmp_path, data=data), "mixed")
