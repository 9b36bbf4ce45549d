"""Claims about a start that waits on the host for its word. Real shells, no engine."""

import subprocess
import time
from pathlib import Path

import pytest

from launcher.tpu_vm.ssh import start_gate as starting

PRELUDE = 'worker=3; say() { echo "$worker $*"; }\n'


def start(container: str, status: str = "echo created") -> subprocess.Popen[str]:
    script = PRELUDE + "\n".join([*starting.gate_lines(container, status), "say started"])
    return subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)


def go(container: str) -> None:
    assert (
        subprocess.run(
            ["sh", "-c", starting.go_script(PRELUDE, container)], capture_output=True, text=True, check=True
        ).stdout
        == "3 go\n"
    )


@pytest.fixture
def name(tmp_path: Path) -> str:
    return f"tpu-launch-test-{tmp_path.name}-{time.time_ns()}"


@pytest.mark.parametrize("first", ["start", "go"])
def test_the_word_and_the_start_find_each_other_whichever_is_first(name: str, first: str) -> None:
    begun = time.monotonic()
    if first == "go":
        go(name)
        waiting = start(name)
    else:
        waiting = start(name)
        time.sleep(0.3)
        assert waiting.poll() is None, "without the word nothing is started"
        go(name)
    assert waiting.communicate(timeout=20)[0] == "3 started\n"
    assert time.monotonic() - begun < starting.GATE_SECONDS / 2
    assert not list(Path("/tmp").glob(f"{name}*"))


def test_together_they_never_miss_each_other(name: str) -> None:
    for number in range(40):
        waiting = start(f"{name}-{number}")
        time.sleep(number * 0.0002)
        go(f"{name}-{number}")
        assert waiting.communicate(timeout=20)[0] == "3 started\n", number


def test_without_the_word_it_is_told_and_nothing_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "GATE_SECONDS", 0.2)
    assert start(name).communicate(timeout=20)[0] == "3 waiting\n"
    assert not list(Path("/tmp").glob(f"{name}*"))


def test_a_container_that_has_started_is_not_waited_for(name: str) -> None:
    assert start(name, "echo running").communicate(timeout=20)[0] == "3 started\n"


def test_a_call_that_is_given_up_ends_at_once() -> None:
    call = starting.Starting(["sh", "-c", "echo said; sleep 60"], timeout=90)
    time.sleep(0.3)
    begun = time.monotonic()
    call.abandon()
    assert call.output() == "said\n"
    assert time.monotonic() - begun < 10


def test_what_gcloud_said_is_known_when_it_gave_up_and_not_before() -> None:
    call = starting.Starting(["sh", "-c", "sleep 0.5; echo 'ERROR: terminal state PREEMPTED' >&2; exit 1"], timeout=90)
    assert call.refusal() is None
    assert call.output() == ""
    assert "PREEMPTED" in (call.refusal() or "")
