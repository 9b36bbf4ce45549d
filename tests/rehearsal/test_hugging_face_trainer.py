"""An unmodified Hugging Face Trainer program trains over both hosts of an emulated slice: one slice, a minute."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from launcher.emulator import control
from tests.rehearsal.workstation import BUCKET, ROOT, Workstation
from training import storage

pytestmark = pytest.mark.alone


def test_hugging_face_trainer_trains_over_two_hosts(emulator: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "hugging_face", emulator.folder / "program")
    file, model = emulator.folder / "program" / "run.yaml", f"gs://{BUCKET}/intents"
    file.write_text(file.read_text().replace("# - --upload=gs://my-bucket/intents", f"- --upload={model}"))
    emulator.good("--emulated", "up", "-f", str(file))
    try:
        ended = emulator.good("--emulated", "run", "--new", "-f", str(file))
    finally:
        emulator.launch("--emulated", "down", "-f", str(file))

    results = re.findall(
        r"^\[(\d)\] process (\d) of 2 on cpu:0: loss ([\d.]+), evaluation loss ([\d.]+), accuracy ([\d.]+)$",
        ended.output,
        re.MULTILINE,
    )
    assert sorted(result[:2] for result in results) == [("0", "0"), ("1", "1")], ended.output
    assert results[0][2:] == results[1][2:], "gradients are averaged over the hosts, and figures gathered"
    losses = [float(loss) for loss in re.findall(r"^\[0\] \{'loss': ([\d.]+),", ended.output, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < 0.85 * losses[0]
    assert len(re.findall(rf"^\[\d\] the model is in {model}$", ended.output, re.MULTILINE)) == 1, (
        "host 0 alone saves it"
    )

    home = Path(emulator.environment["TPU_LAUNCH_HOME"]) / "emulator"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", control.environment(home)["STORAGE_EMULATOR_HOST"])
    config = json.loads(storage.read(f"{model}/config.json"))
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["id2label"]["0"] == "card"
    assert storage.stat(f"{model}/model.safetensors") is not None
