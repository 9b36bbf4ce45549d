"""A model folder of any family either trains, or is refused in one line. The models are tiny and random."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.container import small_runs
from tests.container.test_family_parity import write_model
from tests.nightly import others_at_night
from training.config import Model
from training.errors import BadInput
from training.models.hugging_face import ModelRequirements
from training.models.torch.network import build
from training.registry import MASKED_LM, TASKS, Head

SIZES = {"vocab_size": small_runs.VOCABULARY, "max_position_embeddings": small_runs.SEQUENCE, "pad_token_id": 3}


@pytest.mark.parametrize("family", others_at_night(("distilbert", "modernbert"), ("modernbert",)))
def test_it_learns_and_is_a_model_of_that_family(folder: Path, family: str, capfd: pytest.CaptureFixture[str]) -> None:
    steps = {"train__steps": 24, "checkpoint__every_steps": None, "evaluation__every": 12, "train__strict": True}
    model = {"path": write_model(folder, "mlm", family, **SIZES)}
    settings = small_runs.document(folder, model=model, **steps)  # strict: one program
    summary = small_runs.train_here(settings, family)
    assert "can't be cached" not in capfd.readouterr().err
    assert summary["last_loss"] < summary["first_loss"] - 0.5
    model = transformers.AutoModelForMaskedLM.from_pretrained(summary["model"], attn_implementation="eager")
    assert model.config.model_type == family
    evaluated = small_runs.evaluate_here(settings, summary["model"])
    assert evaluated.figures["loss"] == pytest.approx(summary["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("head", [MASKED_LM, TASKS["classification"].head], ids=["mlm", "classification"])
@pytest.mark.parametrize(("dropout", "rate"), [(None, 0.0), (0.2, 0.2)], ids=["its own", "set"])
def test_only_a_run_changes_a_model_s_dropout(tmp_path: Path, dropout: float | None, rate: float, head: Head) -> None:
    needs = ModelRequirements(vocabulary=64, pad=0, sequence_length=16, head=head, labels=("a", "b"))
    network = build(Model(path=write_model(tmp_path, "mlm", "modernbert")), needs, dropout=dropout, seed=1)
    assert {module.p for module in network.modules() if isinstance(module, torch.nn.Dropout)} == {rate}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gpt2", {"model_type": "gpt2"}),
        ("nothing", {"model_type": "nothing-that-is"}),
        ("xlm", {"model_type": "xlm"}),
        ("sizes", {"hidden_size": "many"}),
        ("heads", {"num_attention_heads": 5}),
        ("activation", {"hidden_act": "none-that-is"}),
        ("wide", {"hidden_size": 64}),
    ],
)
def test_a_model_that_does_not_train_is_refused_in_one_line(folder: Path, name: str, values: dict[str, Any]) -> None:
    """A BERT's folder whose config.json has other values."""
    path = write_model(folder / name, "mlm", "bert", **SIZES)
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(BadInput, match=r"^model\.path:? ") as caught:
        small_runs.train_here(small_runs.document(folder, model={"path": path}, train__steps=2), f"broken-{name}")
    assert path in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
