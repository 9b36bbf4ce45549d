"""Claims about a start that waits on the host until it is released. Real shells; docker answers as the test says."""

import subprocess
import time
from pathlib import Path

import pytest

from launcher.provider import Attempt
from launcher.providers import this_machine
from launcher.tpu_vm import host_scripts
from launcher.tpu_vm.ssh.start_gate import PendingStart
from tests.launcher.script_host import SHELLS, ScriptHost


def attempt(name: str) -> Attempt:
    return Attempt(name, 0, "sha256:ab", ("true",), {})


@pytest.fixture
def name(tmp_path: Path) -> str:
    return f"test-{tmp_path.name}-{time.time_ns()}"


def start(
    host: ScriptHost,
    name: str,
    *,
    status: str = "created",
    seconds: float = host_scripts.GATE_SECONDS,
    shell: str = "sh",
) -> "subprocess.Popen[str]":
    host.answer_container({"Status": status})
    return host.popen(host_scripts.start_script(attempt(name), gated=True, gate_seconds=seconds), shell)


def release(host: ScriptHost, name: str, shell: str = "sh") -> None:
    assert host.run(host_scripts.release_script(attempt(name)), shell) == "tpu-launch 3 released\n"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("first", ["start", "release"])
def test_start_and_release_find_each_other_whichever_is_first(
    host: ScriptHost,
    name: str,
    first: str,
    shell: str,
) -> None:
    begun = time.monotonic()
    if first == "release":
        release(host, name, shell)
        waiting = start(host, name, shell=shell)
    else:
        waiting = start(host, name, shell=shell)
        time.sleep(0.3)
        assert waiting.poll() is None
        assert not any(call.startswith("start") for call in host.calls), "nothing is started before"
        release(host, name, shell)
    assert waiting.communicate(timeout=20)[0] == "tpu-launch 3 started\n"
    assert host.calls[-1] == f"start tpu-launch-{name}-0"
    assert time.monotonic() - begun < host_scripts.GATE_SECONDS / 2
    assert not list(Path("/tmp").glob(f"tpu-launch-{name}*"))


def test_together_they_never_miss_each_other(host: ScriptHost, name: str) -> None:
    for number in range(40):
        waiting = start(host, f"{name}-{number}")
        time.sleep(number * 0.001)
        release(host, f"{name}-{number}")
        assert waiting.communicate(timeout=20)[0] == "tpu-launch 3 started\n", number


@pytest.mark.parametrize("shell", SHELLS)
def test_without_a_release_nothing_is_started_and_nothing_is_left(host: ScriptHost, name: str, shell: str) -> None:
    waiting = start(host, name, seconds=0.2, shell=shell)
    assert waiting.communicate(timeout=20)[0] == "tpu-launch 3 waiting\n"
    assert not any(call.startswith("start") for call in host.calls)
    assert not list(Path("/tmp").glob(f"tpu-launch-{name}*"))


def test_a_container_that_has_started_is_not_waited_for(host: ScriptHost, name: str) -> None:
    waiting = start(host, name, status="running")
    assert waiting.communicate(timeout=20)[0] == "tpu-launch 3 started\n"
    assert not any(call.startswith("start") for call in host.calls)


def test_a_container_that_can_not_be_started_is_reported(host: ScriptHost, name: str) -> None:
    host.answer("start", "echo no such device >&2; exit 1")
    host.answer_container({"Status": "created"})
    report = host.run(host_scripts.start_script(attempt(name)))
    assert report == "tpu-launch 3 failed the container can not be started: no such device\n"


def test_a_call_that_is_given_up_ends_at_once() -> None:
    call = PendingStart(["sh", "-c", "echo said; sleep 60"], this_machine(), timeout=90)
    time.sleep(0.3)
    begun = time.monotonic()
    call.abandon()
    assert call.output() == "said\n"
    assert time.monotonic() - begun < 10


def test_what_gcloud_said_is_known_when_it_gave_up_and_not_before() -> None:
    call = PendingStart(
        ["sh", "-c", "sleep 0.5; echo 'ERROR: terminal state PREEMPTED' >&2; exit 1"], this_machine(), timeout=90
    )
    assert call.refusal() is None
    assert call.output() == ""
    assert "PREEMPTED" in (call.refusal() or "")
