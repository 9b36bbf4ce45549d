"""The state survives the server: what was written is read back, and a kill at any moment leaves a whole file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.emulator.state import Fault, Store, emulator_id, from_json, to_json
from tests.processes import ROOT


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
    path = tmp_path / "state.json"
    store = Store(api.state, path)
    with store.change() as state:
        state.subnet = "first"
    with pytest.raises(RuntimeError), store.change():
        raise RuntimeError
    assert from_json(path.read_text()).subnet == "first"
    assert path.stat().st_mode & 0o777 == 0o600


WRITER = """
import sys
from pathlib import Path
from launcher.emulator.state import EmulatorState, Store
store = Store(EmulatorState("0badcafe", 1, "", "", 1.0, 1.0), Path(sys.argv[1]))
for number in range(10**9):
    with store.change() as state:
        state.port, state.subnet = number, "x" * (number % 1000) * 50
    if number == 0:
        print("begun", flush=True)
"""


def test_a_server_killed_at_any_moment_leaves_a_whole_state(tmp_path: Path) -> None:
    """Starts a process that writes without pause, and kills it, several times."""
    path = tmp_path / "state.json"
    for attempt in range(5):
        command, environment = [sys.executable, "-c", WRITER, str(path)], {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        process.stdout.readline()
        time.sleep(0.01 + 0.007 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        state = from_json(path.read_text())
        assert len(state.subnet) == state.port % 1000 * 50


def test_an_emulator_is_named_by_its_home_seen_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert emulator_id(Path("a/../home")) == emulator_id(tmp_path / "home")
    assert emulator_id(tmp_path / "home") != emulator_id(tmp_path / "other")
