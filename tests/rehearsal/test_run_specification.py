"""Claims about the run specification, on an emulated slice of two hosts: every later attempt is the same program with
the same configuration, secrets and overlay, whichever launcher watches; what happened while none watched is found out.
Starts one slice; about 2 minutes."""

from __future__ import annotations

import hashlib
import json
import stat
import time
from pathlib import Path

import pytest

from tests.rehearsal.conftest import SLICE
from tests.rehearsal.workstation import Running, Workstation

SECRET = "hf_v3ry-s3cret"
PLAIN = "fr0m-the-env-file"
PROGRAM = (
    "import hashlib, json, os, sys, time; from training import probe; "
    "digest = lambda name: hashlib.sha256(os.environ[name].encode()).hexdigest(); "
    "print('STARTED', json.dumps([os.environ['TPU_LAUNCH_ATTEMPT'], sys.argv[1:], os.environ['SETTING'], "
    "digest('HF_TOKEN'), digest('FROM_FILE'), probe.WHERE]), flush=True); "
    "time.sleep(600 if os.environ['TPU_LAUNCH_ATTEMPT'] == '0' else 2)"
)


def start_detached(work: Workstation, file: str) -> str:
    """Starts a run with everything that a command line can add, detaches from it, and changes all of that. Its id."""
    work.file("some.env", f"FROM_FILE={PLAIN}\n")
    (work.folder / "changed").mkdir(exist_ok=True)
    work.file("changed/probe.py", "WHERE = 'the overlay of the start'\n")
    running = work.begin(
        *("--emulated", "run", "--new", "-f", file, "--env-file", "some.env"),
        *("--set", "run.preemption_retries=2", "--set", "run.secrets=[HF_TOKEN]"),
        *("--set", "run.environment={SETTING: of the start}", "--overlay", "changed=/opt/tpu-launch/training"),
        *("--", "python", "-c", PROGRAM, "an argument"),
        environment={"HF_TOKEN": SECRET},
    )
    run_id = running.wait_for(r"run \S+: attempt 0 on").split("run ")[1].split(":")[0]
    for worker in (0, 1):
        running.wait_for(rf"^\[{worker}\] STARTED")
    running.interrupt()
    assert running.end(30).code == 130
    work.file("changed/probe.py", "WHERE = 'changed since'\n")
    (work.folder / "some.env").unlink()
    return run_id


def other_file(work: Workstation) -> str:
    """A file of the same slice that means another run."""
    text = SLICE.replace("NAME", "two").replace("TYPE", "v4-16")
    return work.file(
        "other.yaml", text + "run: {command: [sh, -c, 'echo another program'], environment: {SETTING: x}}\n"
    )


def expected(attempt: int) -> list[object]:
    digests = [hashlib.sha256(value.encode()).hexdigest() for value in (SECRET, PLAIN)]
    return [str(attempt), ["an argument"], "of the start", *digests, "the overlay of the start"]


def kill_host(work: Workstation) -> None:
    work.good("emulator", "inject", "kill-host", "two", "1", "--for", "5")


def attach(work: Workstation, run_id: str, environment: dict[str, str]) -> Running:
    """Attaches from a file that says something else, and returns once the run is watched."""
    running = work.begin("--emulated", "run", "--attach", "--json", "-f", other_file(work), environment=environment)
    lock = run_folder(work, run_id) / "lock"
    deadline = time.monotonic() + 60
    while lock.read_text() != str(running.process.pid):
        assert time.monotonic() < deadline, "\n".join(running.lines)
        time.sleep(0.1)
    return running


def run_folder(work: Workstation, run_id: str) -> Path:
    return work.runs / run_id


@pytest.mark.nightly
def test_the_attempt_after_an_attach_is_the_program_that_was_started(two_hosts: tuple[Workstation, str]) -> None:
    work, file = two_hosts
    run_id = start_detached(work, file)
    running = attach(work, run_id, {"HF_TOKEN": SECRET, "FROM_FILE": PLAIN})
    kill_host(work)
    ended = running.end(180)
    assert ended.code == 0, ended.output
    assert "another program" not in ended.output
    for worker in (0, 1):
        prefix = f"[{worker}] STARTED "
        starts = [
            json.loads(line.removeprefix(prefix)) for line in ended.output.splitlines() if line.startswith(prefix)
        ]
        assert starts[-1] == expected(1), "what the second attempt was given"
    attempts = [event for event in work.events(run_id) if event["event"] == "attempt"]
    assert len(attempts) == 2
    assert {key: value for key, value in attempts[0].items() if key not in ("time", "attempt")} == {
        key: value for key, value in attempts[1].items() if key not in ("time", "attempt")
    }
    folder = run_folder(work, run_id)
    kept = [folder / "specification.yaml", *folder.glob("overlay-*")]
    assert len(kept) == 2
    for path in kept:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.nightly
def test_an_attempt_whose_secrets_are_missing_is_not_started_and_the_run_can_be_resumed(
    two_hosts: tuple[Workstation, str],
) -> None:
    work, file = two_hosts
    run_id = start_detached(work, file)
    running = attach(work, run_id, {"FROM_FILE": PLAIN})
    kill_host(work)
    ended = running.end(120)
    assert ended.code == 2, ended.output
    assert "attempt 1 is not started" in ended.output
    assert "HF_TOKEN" in ended.output
    assert "Traceback" not in ended.output
    events = work.events(run_id)
    assert [event["event"] for event in events].count("attempt") == 1
    assert not [event for event in events if event["event"] == "recover"], "no budget is spent on it"

    work.good("--emulated", "up", "-f", file)
    resumed = work.launch(
        *("--emulated", "run", "--json", "-f", file, "--set", "run.secrets=[HF_TOKEN]"),
        *("--set", "run.environment={SETTING: of the start}", "--", "python", "-c", PROGRAM, "an argument"),
        environment={"HF_TOKEN": SECRET, "FROM_FILE": PLAIN},
    )
    assert resumed.code == 0, resumed.output
    assert resumed.json()["run"] == run_id
    assert f"[0] STARTED {json.dumps(expected(1))}" in resumed.output


def detach(work: Workstation, file: str, seconds: int) -> str:
    """Starts a run of `sleep` on both hosts and detaches from it. Its id."""
    running = work.begin("--emulated", "run", "--new", "-f", file, "--", "sleep", str(seconds))
    run_id = running.wait_for(r"run \S+: started on all hosts", 120).split("run ")[1].split(":")[0]
    running.interrupt()
    assert running.end(30).code == 130
    return run_id


def test_a_host_that_rebooted_while_no_launcher_watched_is_lost_whatever_its_engine_says(
    two_hosts: tuple[Workstation, str],
) -> None:
    """It was never seen away, and its engine says 255 of a container whose end it did not see."""
    work, file = two_hosts
    run_id = detach(work, file, 600)
    work.good("emulator", "inject", "kill-host", "two", "1")
    work.good("emulator", "inject", "restore-host", "two", "1")
    ended = work.launch("--emulated", "run", "--attach", "--json", "-f", file)
    assert ended.code == 11, ended.output
    cause = ended.json()["cause"]
    assert (cause["worker"], cause["exit_code"]) == (1, 255), cause
    assert "rebooted" in cause["what"]
    assert ended.json()["run"] == run_id


def test_a_run_does_not_vanish_because_its_hosts_can_not_be_asked(two_hosts: tuple[Workstation, str]) -> None:
    work, file = two_hosts
    run_id = detach(work, file, 25)
    for worker in ("0", "1"):
        work.good("emulator", "inject", "cut-host", "two", worker, "--for", "15")
    ended = work.launch("--emulated", "run", "--json", "-f", file, "--", "sleep", "25")
    assert ended.code == 0, ended.output
    assert (ended.json()["run"], ended.json()["attempt"]) == (run_id, 0)
    kinds = [event["event"] for event in work.events(run_id)]
    assert kinds.count("attempt") == 1
    assert [event["outcome"] for event in work.events(run_id) if event["event"] == "ended"] == ["finished"]
