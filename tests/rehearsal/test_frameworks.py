"""Unmodified programs of other frameworks train over both hosts of an emulated slice: a slice and a minute for each."""

import json
import math
import re
import shutil

import pytest

from launcher.emulator import control
from tests.rehearsal.workstation import BUCKET, ROOT, Ended, Workstation
from training import storage

pytestmark = pytest.mark.alone


@pytest.mark.nightly
def test_hugging_face_trainer_trains_over_two_hosts(emulator: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "hugging_face", emulator.folder / "program")
    file, model = emulator.folder / "program" / "run.yaml", f"gs://{BUCKET}/intents"
    file.write_text(file.read_text().replace("# - --upload=gs://my-bucket/intents", f"- --upload={model}"))
    ended = emulator.train_on_slice(str(file))

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
    saved = re.findall(rf"^\[\d\] the model is in {model}$", ended.output, re.MULTILINE)
    assert len(saved) == 1, "host 0 alone saves it"

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", control.environment(emulator.emulator)["STORAGE_EMULATOR_HOST"])
    config = json.loads(storage.read(f"{model}/config.json"))
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["id2label"]["0"] == "card"
    assert storage.stat(f"{model}/model.safetensors") is not None


@pytest.mark.nightly
def test_accelerate_trains_over_two_hosts(emulator: Workstation) -> None:
    told = figures(run(emulator, "accelerate"), r"on cpu:0: epoch 2, loss ([\d.]+), accuracy ([\d.]+)")
    loss, accuracy = map(float, told)
    assert loss < 0.9 * math.log(3), "three classes"
    assert accuracy > 0.6


def test_jax_trains_over_two_hosts(emulator: Workstation) -> None:
    ended = run(emulator, "jax")
    (last,) = figures(ended, r"2 cpu devices: loss ([\d.]+)")
    [first] = re.findall(r"^\[0\] step 1: loss ([\d.]+)$", ended.output, re.MULTILINE)
    assert float(last) < 0.6 * float(first)


@pytest.mark.nightly
def test_jax_goes_on_after_a_lost_host_and_a_stop(emulator: Workstation) -> None:
    """A step that is done again after a restart has the same loss again."""
    work, steps = emulator, 3_000
    shutil.copytree(ROOT / "examples" / "jax", work.folder / "saving")
    file = work.folder / "saving" / "run.yaml"
    saving = f"- --save=gs://{BUCKET}/jax.npz\n    - --steps={steps}\n    - --save-every=250"
    text = file.read_text()
    file.write_text(text.replace("# - --save=gs://my-bucket/jax.npz", saving))
    assert file.read_text() != text
    command = ("run", "--set", "run.preemption_retries=1")
    with work.slice_of(str(file)) as made:
        running = made.begin_on_slice(*command)
        running.wait_for(r"^\[0\] saved step 500$")
        work.good("emulator", "inject", "kill-host", "jax", "1", "--for", "3")
        running.wait_for(r"^\[1\] goes on from step \d+$")
        made.good_on_slice("stop")
        stopped = running.end(60)
        assert stopped.code == 75, stopped.output
        ended = made.good_on_slice(*command)
    begun = re.findall(r"^\[(\d)\] goes on from step (\d+)$", ended.output, re.MULTILINE)
    assert sorted(host for host, _ in begun) == ["0", "1"]
    assert len({step for _, step in begun}) == 1
    losses: dict[str, set[str]] = {}
    lines = "\n".join((*running.lines, ended.output))
    for step, loss in re.findall(r"^\[0\] step (\d+): loss ([\d.]+)$", lines, re.MULTILINE):
        losses.setdefault(step, set()).add(loss)
    assert {step: several for step, several in losses.items() if len(several) > 1} == {}
    assert len(losses) == steps // 100 + 1
    figures(ended, r"2 cpu devices: loss ([\d.]+)")


def run(work: Workstation, example: str) -> Ended:
    """Runs a folder of examples/ on a slice of its own."""
    shutil.copytree(ROOT / "examples" / example, work.folder / example)
    return work.train_on_slice(f"{example}/run.yaml")


def figures(ended: Ended, pattern: str) -> tuple[str, ...]:
    """What both processes say, which must be the same."""
    lines = re.findall(rf"^\[(\d)\] process (\d) of 2[, ]+{pattern}$", ended.output, re.MULTILINE)
    assert sorted(line[:2] for line in lines) == [("0", "0"), ("1", "1")], ended.output
    assert lines[0][2:] == lines[1][2:], "both hosts take part in every step"
    return tuple(lines[0][2:])
