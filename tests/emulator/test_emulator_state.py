"""The state survives the server: what was written is read back, and the file is always whole."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from launcher.emulator.state import Fault, Store, emulator_id, from_json, to_json


def test_a_state_with_everything_in_it_comes_back_as_it_was(api: Any) -> None:
    node = api.ready(metadata={"k": "v\n\u00fc"})
    node.hosts[0].guest_attributes["hostkeys/ssh-ed25519"] = "AAAA"
    api.call("DELETE", "nodes", "pod")
    api.state.faults.append(Fault("errors", "storage", status=429))
    api.state.pushed["europe-docker.pkg.dev/p/r/i"] = {"latest": "sha256:1"}
    again = from_json(to_json(api.state))
    assert again == api.state
    assert again.nodes[node.name].hosts[0].guest_attributes == {"hostkeys/ssh-ed25519": "AAAA"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1}', '{"format": 1, "nodes": 3}'])
def test_what_is_not_a_state_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"state|Expecting"):
        from_json(text)


def test_a_change_that_fails_is_not_written(api: Any, tmp_path: Path) -> None:
    store = Store(api.state, path := tmp_path / "state.json")
    with store.change() as state:
        state.subnet = "first"
    with pytest.raises(RuntimeError), store.change():
        raise RuntimeError
    assert from_json(path.read_text()).subnet == "first"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_write_that_does_not_end_leaves_the_state_before(api: Any, tmp_path: Path) -> None:
    store = Store(api.state, path := tmp_path / "state.json")
    with store.change():
        pass
    before = path.read_text()
    with patch("os.replace", side_effect=PermissionError), pytest.raises(PermissionError), store.change() as state:
        state.subnet = "x" * 50_000
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path], "the half-written file is gone"


def test_an_emulator_is_named_by_its_home_seen_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert emulator_id(Path("a/../home")) == emulator_id(tmp_path / "home")
    assert emulator_id(tmp_path / "home") != emulator_id(tmp_path / "other")
