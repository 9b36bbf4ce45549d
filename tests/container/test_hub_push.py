"""A run pushes its model to the Hub as it trains; a dead, slow or refusing Hub adds a warning and a line of summary."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs
from tests.container.hub import Hub, Repository
from tests.processes import run_python, wait_until
from training.config import Hub as HubSettings
from training.errors import BadInput
from training.models import hub

TOKEN = "hf_ThisIsTheSecretOfTheTest"
REPOSITORY = "org/bert-small"


@pytest.fixture
def server(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub.token = TOKEN
    for name, value in (("HF_ENDPOINT", hub.url), ("HF_TOKEN", TOKEN), ("HF_HOME", str(tmp_path / "home"))):
        monkeypatch.setenv(name, value)
    return hub


def run(folder: Path, run_id: str, **settings: Any) -> dict[str, Any]:
    settings |= {"repository": REPOSITORY}
    config = small_runs.document(folder, hub=settings, data__evaluation=None, train__steps=8)
    return small_runs.train_here(config, run_id)


def no_token_in(folder: Path) -> bool:
    return not any(TOKEN.encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_the_model_is_pushed_while_it_trains_and_at_the_end(folder: Path, server: Hub, capfd: Any) -> None:
    summary = run(folder, "pushed", every="checkpoint")
    repository = server.repositories[REPOSITORY]
    assert repository.private
    assert repository.summaries[-1] == "Step 8 of pushed"
    for file in Path(summary["model"]).iterdir():
        assert repository.files[file.name] == file.read_bytes(), file.name
    assert "pipeline_tag: fill-mask" in repository.files["README.md"].decode()
    assert any("lfs/objects" in request for request in server.requests), "the weights go through LFS"
    assert (summary["hub"]["step"], summary["hub"]["error"]) == (8, None)
    assert summary["hub"]["commit"].startswith(f"{server.url}/{REPOSITORY}/commit/")
    output = capfd.readouterr()
    assert f"hub: {REPOSITORY} has step 8: {server.url}" in output.out
    assert TOKEN not in output.out + output.err
    assert no_token_in(folder)
    assert server.refused_tokens == 0


TROUBLES: dict[str, tuple[str, Callable[[Hub, pytest.MonkeyPatch], object]]] = {
    "dead": ("Connection", lambda hub, patch: patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")),
    "refusing": ("500", lambda hub, patch: setattr(hub, "refusing", True)),
    "slow": ("hub.wait_seconds (4 s)", lambda hub, patch: hub.release.clear()),
    "token": ("401", lambda hub, patch: patch.setenv("HF_TOKEN", f"{TOKEN}-of-another-user")),
    "no-token": ("not in the environment", lambda hub, patch: patch.delenv("HF_TOKEN")),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_with_the_hub_does_not_touch_the_run(
    folder: Path, server: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    expected, make_trouble = TROUBLES[trouble]
    make_trouble(server, monkeypatch)
    summary = run(folder, trouble, wait_seconds=4 if trouble == "slow" else 120)
    assert (summary["steps"], summary["committed_step"]) == (8, 8)
    assert summary["hub"]["commit"] is None
    assert expected in summary["hub"]["error"]
    output = capfd.readouterr()
    assert output.err.count("tpu-train: warning: hub: ") == 1
    assert f"hub: {REPOSITORY} has nothing of this attempt; the last upload failed: " in output.out
    assert TOKEN not in output.out + output.err
    assert no_token_in(folder)
    assert not server.repositories.get(REPOSITORY, Repository()).summaries


def test_training_does_not_wait_for_a_slow_hub(folder: Path, server: Hub) -> None:
    """The first upload hangs in its commit; steps go on, and all but the last of what is committed then is left out."""
    server.release.clear()
    settings = HubSettings(repository=REPOSITORY, every="checkpoint")
    pushes = hub.BackgroundUploader(settings, str(folder / "runs" / "pushed"), print)
    began = time.monotonic()
    pushes.note_commit(4)
    assert time.monotonic() - began < 60
    wait_until(lambda: any("/commit/" in request for request in server.requests), 600)
    pushes.note_commit(8)
    server.release.set()
    assert pushes.finish(8)["step"] == 8
    assert server.repositories[REPOSITORY].summaries == ["Step 4 of pushed", "Step 8 of pushed"]


def test_the_command_leaves_a_card_alone(folder: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories[REPOSITORY] = Repository(private=False, files={"README.md": b"written by hand"})
    place = str(folder / "runs" / "pushed")
    output = run_python("-m", "training.cli", "push", place, REPOSITORY, "--step", "4")
    assert output.startswith(f"{REPOSITORY}: the model after step 4: {server.url}")
    assert server.repositories[REPOSITORY].files["README.md"] == b"written by hand"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BadInput, match="HF_TOKEN is not in the environment"):
        hub.push_model(place, REPOSITORY, None, True)
