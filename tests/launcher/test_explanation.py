"""Claims about hangs of whole runs, with a provider in memory: when a run ends, what the verdict says, what is kept."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import BadInput, LaunchError
from launcher.masking import SecretMasker
from launcher.run import events, execution
from launcher.run.hang import blame_silent_host, explain_stall
from launcher.run.verdict import Cause, Kind, Verdict
from tests.launcher.test_hang import COLLECTIVE, USER, dump
from tests.launcher.test_runs import Hosts, Workstation, detach
from training.telemetry.progress_line import ProgressLine

STUCK = {worker: (ProgressLine(7, 50, "training", loss=2.5),) for worker in (0, 1)}
STACKS = {0: dump(COLLECTIVE), 1: dump(USER) + "source /app/my_data.py:12     open('s3cret')\n"}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workstation:
    monkeypatch.setattr("launcher.run.supervise._PROGRESS_EVERY", 0.2)
    work = Workstation(tmp_path, Hosts([None]))
    work.hosts.progress, work.hosts.stacks = dict(STUCK), dict(STACKS)
    return work


def test_a_run_that_hangs_ends_with_the_host_and_the_line(work: Workstation) -> None:
    config = work.config("run.stall_minutes=0.02", "run.secrets=[TOKEN]")
    outcome = work.run(config, {"TOKEN": "s3cret"})
    assert outcome.verdict.kind is Kind.STALLED
    cause = outcome.verdict.cause
    assert cause.worker == 1
    where = "1 of 2 hosts wait in step 8's collective (train.py:50); host 1 is in augment at my_data.py:12"
    assert cause.what.startswith(where)
    assert "host 0: step 7, training: waits for devices" in outcome.verdict.symptoms[0]
    folder = work.ledger.folder
    kept = (folder / "stacks" / "attempt-0" / "explanation.txt").read_text()
    assert "host 1 is in augment" in kept
    assert "s3cret" not in kept + (folder / "events.jsonl").read_text(), "secrets are masked"
    assert (folder / "stacks" / "attempt-0" / "host-1.txt").read_text().count("=== 5 s later") == 1
    with tarfile.open(folder / "post-mortem-0.tar.gz") as archive:
        assert any(name.endswith("stacks/attempt-0/explanation.txt") for name in archive.getnames())
    assert [line["loss"] for line in map(json.loads, (folder / "progress-0.jsonl").read_text().splitlines())] == [2.5]


def test_a_secret_is_masked_before_its_line_is_cut(work: Workstation) -> None:
    command = "python train.py --config configs/larger.yaml --token "  # 60 characters of a command are told
    stopped = dump(COLLECTIVE, state="T (stopped)")
    work.hosts.stacks[1] = stopped.replace("python train.py", command + "hf_secret0123456789")
    config = work.config("run.stall_minutes=0.02", "run.secrets=[TOKEN]")
    cause = work.run(config, {"TOKEN": "hf_secret0123456789"}).verdict.cause
    assert "has a stopped process" in cause.what
    assert "hf_" not in cause.what
    assert "hf_" not in (work.ledger.folder / "stacks" / "attempt-0" / "explanation.txt").read_text()


def test_a_run_that_writes_nothing_but_makes_progress_goes_on(work: Workstation) -> None:
    work.hosts.quiet = True
    steps = iter(range(8, 10**6))

    def step() -> None:
        number = next(steps)
        work.clock.skipped += 5.0  # 75 s in all
        work.hosts.progress = {0: (ProgressLine(number, phase="training", step_seconds=0.25),)}
        if number == 22:
            work.hosts.end(0)

    work.hosts.hooks["observe"] = [step] * 100
    assert work.run(work.config("run.stall_minutes=0.5")).verdict.kind is Kind.FINISHED
    assert [event.step_seconds for event in work.ledger.events() if isinstance(event, events.Ended)] == [0.25]


def test_explain_takes_stacks_from_a_live_run_and_changes_nothing(work: Workstation) -> None:
    config = work.config()
    with pytest.raises(BadInput), execution.live_session(config, work.context(), None):
        pass
    detach(work, config)
    events = len(work.ledger.events())
    with execution.live_session(config, work.context(), None) as session:
        text, folder = execution.explain_run(session)
        assert "in step 8's collective (train.py:50); host 1 is in augment at my_data.py:12" in text
        assert (Path(folder) / "host-0.txt").exists()
        work.hosts.hooks["stacks"] = [lambda: None]
        work.hosts.fail("stacks", LaunchError("away"))
        begun = session.machine.clock.monotonic()
        assert "host 1 is in augment" in execution.explain_run(session)[0], "the first sample will do"
        assert session.machine.clock.monotonic() - begun >= 5.0, "what moves meanwhile does not hang"
        work.hosts.stacks = {}
        assert execution.explain_run(session)[0] is None
        work.hosts.fail("stacks", LaunchError("away"))
        assert execution.explain_run(session)[0] is None
    assert len(work.ledger.events()) == events


@pytest.mark.parametrize("silent", [0, 1])
def test_a_host_whose_silence_ended_the_others_is_explained_alone_if_it_still_runs(
    work: Workstation, silent: int
) -> None:
    detach(work, work.config())
    message = f"UNAVAILABLE: Task /job:worker/replica:0/task:{silent} heartbeat timeout. This indicates that"
    (ledger := work.ledger).log_file(0, 1 - silent).write_text(f"2026-01-01T00:00:00Z {message}\n")
    failed = Verdict(Kind.FAILED, Cause(1 - silent, "exit code 1", 1), ("host 2: exit code 1",))
    for other in (replace(failed, kind=Kind.HOST_LOST), replace(failed, cause=Cause(silent, "exit code 1", 1))):
        assert blame_silent_host(ledger, 0, other, [silent]) is other
    assert blame_silent_host(ledger, 0, failed, [1 - silent]) is failed
    stalled = blame_silent_host(ledger, 0, failed, [silent])
    assert (stalled.kind, stalled.cause.worker) == (Kind.STALLED, silent)
    assert stalled.symptoms == (f"host {1 - silent}: exit code 1", "host 2: exit code 1")
    with execution.live_session(work.config(), work.context(), None) as session:
        explained = explain_stall(session, 0, stalled, {}, 0.0, SecretMasker({}))
        work.hosts.stacks = {}
        assert explain_stall(session, 0, stalled, {}, 0.0, SecretMasker({})) is stalled
    assert explained.cause.worker == silent
    assert explained.cause.what.startswith(
        "it stopped sending heartbeats, so TensorFlow ended the other hosts: the host "
    )
    assert explained.symptoms == stalled.symptoms
