"""The public recipe (transformers' examples/tensorflow/language-modeling-tpu) from end to end with our commands: a
Unigram tokenizer, shards in its layout without a manifest, masked-language modelling on TPUStrategy's path through the
backend, and `pipeline("fill-mask")` of what was exported.

Starts three processes, the last of them a training of a minute at most on two logical devices.
"""

from pathlib import Path

import pytest

from tests.container import small_runs
from tests.processes import run_python
from training.data.formats.recipe_layout import NAME
from training.models.predict import open_pipeline

STEPS = 50


def tpu_train(*arguments: str) -> str:
    return run_python("-m", "training.cli", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recipe")
    corpus = ("--corpus", "builtin:pydoc")
    tpu_train("tokenizer", *corpus, "--algorithm", "unigram", "--vocabulary", "600", "--out", str(place / "tokenizer"))
    shards = ("--layout", "recipe", "--records-per-shard", "500", "--sequence-length", "32")
    tpu_train("shards", *corpus, "--tokenizer", str(place / "tokenizer"), *shards, "--out", str(place))
    for split in ("train", "evaluation"):
        (place / split / "dataset.json").unlink()  # the recipe writes none
    return place


def test_the_public_recipe_ends_with_a_model_that_fills_masks(folder: Path) -> None:
    model = {"name": "bert-tiny", "hidden_size": 64, "layers": 2, "heads": 2, "max_positions": 32}
    train = {"steps": STEPS, "global_batch_size": 32, "learning_rate": 0.003, "warmup_steps": 10, "strict": True}
    config = small_runs.document(folder, backend="tensorflow", model=model, train=train, checkpoint={})
    assert all(NAME.match(path.name) for path in (folder / "train").iterdir())
    found = small_runs.trained(folder, "wiki", config, seconds=280, CPU_NUM_DEVICES="2")
    assert (found["devices"], found["steps"]) == (2, STEPS)
    assert found["last_loss"] < found["first_loss"] - 1

    fill = open_pipeline("fill-mask", found["model"])
    answers = fill(f"The {fill.tokenizer.mask_token} statement is used to end a loop.", top_k=5)
    chances = [answer["score"] for answer in answers]
    assert chances == sorted(chances, reverse=True)
    assert 10 / 600 < chances[0] < 1  # it has learnt what is likely
    assert not {answer["token_str"] for answer in answers} & {"[CLS]", "[SEP]", "<pad>", "[MASK]"}
