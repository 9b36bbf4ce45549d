"""Claims about `tpu-launch supervise` and about commands on a run of a bucket from a machine that has nothing of it."""

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.cli.main import cli
from launcher.emulator.http_server import HttpResponse
from launcher.errors import BadInput, CommandMissing, LaunchError
from launcher.images.build import Image
from launcher.provider import ContainerState, container_name
from launcher.providers import require_programs, this_machine
from launcher.run import events, launch, specification, supervisor
from launcher.run import ledger as ledger_module
from launcher.run.events import AttemptBegan, Ended, RunEvent, Started
from launcher.run.ledger import Ledger
from launcher.run.session import import_run, resolve_run, supervising
from launcher.run.stop import delete_slice
from launcher.run.supervisor import Supervisor, is_unfinished
from launcher.run.verdict import Cause, Kind
from launcher.shell import Result
from tests.launcher.emulated_gcloud import Clock
from tests.launcher.run_files import new_run
from tests.launcher.test_runs import FakeProvider, FastClock, Workstation
from tests.processes import wait_until
from tests.servers import BucketServer
from training import storage

RUNS = "gs://bucket/runs"
RUN = {"command": ["python", "x.py"], "secrets": ["TOKEN"], "preemption_retries": 1, "failure_retries": 0, "budget": 5}
FIRST = "2026-01-01T00:00:00Z"  # when the slice was created


pytestmark = pytest.mark.usefixtures("server")


def begin(work: Workstation, run_id: str, *recorded: RunEvent, url: str = RUNS, provider: str = "tpu-vm") -> Ledger:
    """Returns a new run of a laptop with these events; its launcher has released the lease."""
    machine = replace(this_machine(), clock=FastClock())
    options = {"configuration": {"run": RUN}, "secrets": ["TOKEN"], "image": "r/i@sha256:" + "0" * 64}
    bucket = url and f"{url}/{run_id}/launcher"
    ledger = new_run(work.folder / "laptop", run_id, machine, bucket=bucket, provider=provider, **options)
    with supervising(ledger, this_machine(), pytest.fail):
        for event in recorded:
            ledger.append(event)
            ledger.clock.sleep(60.0)
    return ledger


def take_over(work: Workstation, run_id: str = "r", **secrets: str) -> Any:
    """Supervises a run of the bucket on a machine that may have nothing of it."""
    return supervisor.take_over(import_run(work.home, this_machine(), f"{RUNS}/{run_id}"), work.context(**secrets))


def set_container(work: Workstation, run_id: str, *state: Any) -> None:
    work.hosts.state[container_name(run_id, 0)] = ContainerState(*state)


BEGAN, RUNS_NOW, PREEMPTED = AttemptBegan(0), Started(0), Ended(0, "preempted", Cause(-1, "the slice is PREEMPTED"))
COSTLY = AttemptBegan(0, dollars_an_hour=1e9)
STOPPED, SPENT = events.RunStopRequested(0), events.RunStopRequested(0, by_budget=True)
AGAIN = events.Recovering(0, "preempted", "preemption 1 of 1", 0.0)
REPLACED = events.SliceReplaced(0, 1, "?", FIRST)
GIVEN_UP = events.RecoveryGivenUp(0, "no capacity", "tried for 60 minutes")


@pytest.mark.parametrize(
    ("recorded", "unfinished"),
    [
        ([], False),
        ([BEGAN], True),
        ([BEGAN, RUNS_NOW], True),
        ([BEGAN, RUNS_NOW, STOPPED], True),
        ([BEGAN, RUNS_NOW, STOPPED, Ended(0, "saved")], False),
        ([BEGAN, RUNS_NOW, SPENT, Ended(0, "saved")], True),
        ([BEGAN, RUNS_NOW, SPENT, Ended(0, "saved"), GIVEN_UP], False),
        ([BEGAN, RUNS_NOW, SPENT, Ended(0, "saved"), STOPPED], False),
        ([BEGAN, RUNS_NOW, Ended(0, "finished")], False),
        ([BEGAN, RUNS_NOW, Ended(0, "failed")], False),
        ([COSTLY, RUNS_NOW, Ended(0, "failed")], True),
        ([BEGAN, RUNS_NOW, PREEMPTED], True),
        ([BEGAN, RUNS_NOW, PREEMPTED, AGAIN], True),
        ([BEGAN, RUNS_NOW, PREEMPTED, AGAIN, GIVEN_UP], False),
        ([BEGAN, RUNS_NOW, PREEMPTED, AGAIN, AttemptBegan(1), Started(1), replace(PREEMPTED, attempt=1)], False),
        ([BEGAN, Ended(0, "not started", Cause(-1, "no disk"))], False),
        ([BEGAN, Ended(0, "not started")], False),
        ([BEGAN, Ended(0, "not started", Cause(-1, events.INTERRUPTED))], True),
        ([BEGAN, Ended(0, "not started", Cause(-1, "?")), events.RoundFailed(0, "no answer", "again", 5.0)], True),
        ([BEGAN, RUNS_NOW, Ended(0, "vanished")], True),
    ],
)
def test_a_run_has_to_go_on_unless_it_is_over(work: Workstation, recorded: list[RunEvent], unfinished: bool) -> None:
    assert is_unfinished(begin(work, "r", *recorded, url=""), 0.0) is unfinished


@pytest.mark.parametrize(
    ("recorded", "running", "attempts"),
    [
        ([BEGAN, RUNS_NOW], "running", 0),  # its launcher was killed while it watched
        ([BEGAN], "created", 1),  # while it started the attempt
        ([BEGAN, RUNS_NOW], "absent", 1),  # and the hosts were made again
        ([BEGAN, RUNS_NOW, PREEMPTED], "absent", 1),  # before it decided
        ([BEGAN, RUNS_NOW, PREEMPTED, AGAIN], "absent", 1),  # while it recovered the run
    ],
)
def test_a_dead_launchers_run_goes_on(work: Workstation, recorded: list[RunEvent], running: str, attempts: int) -> None:
    begin(work, "r", *recorded)
    set_container(work, "r", running)
    if running == "running":
        work.hosts.hooks["observe"] = [lambda: None] * 4 + [lambda: set_container(work, "r", "exited", 0)]
    work.hosts.slice_state = "READY" if running != "absent" else "PREEMPTED"
    if attempts:
        with pytest.raises(BadInput, match=r"attempt 1 is not started: values of secrets are missing .*: TOKEN"):
            take_over(work)
        assert any("no other attempt starts without them: ann set them on" in text for text in work.messages)
    outcome = take_over(work, TOKEN="s3cret")
    assert (outcome.attempt, outcome.verdict.kind) == (attempts, Kind.FINISHED), work.messages
    assert [attempt.number for attempt in work.hosts.attempts] == [1] * attempts
    assert work.hosts.calls.count("create") == attempts, "the slice may be gone"
    found = [storage.read(each.url) for each in storage.listing(f"{RUNS}/r/launcher/events")]
    assert len(found) == len(work.ledger.entries())
    assert not any(b"s3cret" in text for text in found)
    assert take_over(work, TOKEN="s3cret") is None, "nothing is left to do"


def test_a_supervisor_deletes_the_slice_of_a_dead_launchers_run_whose_budget_is_spent(work: Workstation) -> None:
    begin(work, "r", BEGAN, RUNS_NOW, SPENT, Ended(0, "saved"))
    assert take_over(work) is None
    assert work.hosts.slice_state is None, work.messages
    assert take_over(work) is None
    assert (work.hosts.calls, work.hosts.withdrawals) == (["delete"], 1)
    begin(work, "open", BEGAN, RUNS_NOW, SPENT)
    set_container(work, "open", "exited", 75)
    work.hosts.slice_state = "READY"
    assert take_over(work, "open").verdict.kind is Kind.SAVED, "its attempt saves first"
    assert work.hosts.slice_state is None


@pytest.mark.parametrize("created", [FIRST, "2026-02-02T00:00:00Z"])
@pytest.mark.parametrize(
    "recorded",
    [
        pytest.param([BEGAN, RUNS_NOW, replace(SPENT, slice_created=FIRST), Ended(0, "saved")], id="stopped"),
        pytest.param([COSTLY, Started(0, slice_created=FIRST), Ended(0, "failed")], id="spent"),
        pytest.param([BEGAN, RUNS_NOW, Ended(0, "host lost"), AGAIN, REPLACED], id="replaced"),
    ],
)
def test_a_deletion_goes_on_for_its_recorded_slice(work: Workstation, created: str, recorded: list[RunEvent]) -> None:
    begin(work, "r", *recorded)
    work.hosts.created = created
    take_over(work, TOKEN="x")
    assert ("delete" in work.hosts.calls) == (created == FIRST), work.messages
    left = "is not the one to delete: it was created at 2026-02-02"
    assert any(left in text for text in work.messages) == (created != FIRST)
    assert ("start" in work.hosts.calls) == (REPLACED in recorded)


def test_down_deletes_the_slice_although_the_run_s_bucket_refuses(work: Workstation, server: BucketServer) -> None:
    ledger = begin(work, "r", BEGAN, RUNS_NOW)
    set_container(work, "r", "exited", 75)
    server.fault = lambda request: HttpResponse(403)
    delete_slice(specification.read(ledger.folder).config(), replace(work.context(), home=work.folder / "laptop"))
    assert work.hosts.calls == ["stop", "delete"]
    assert any("run r: its stop can't be recorded" in text for text in work.messages)


def test_a_run_supervised_elsewhere_keeps_its_requests(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = begin(work, "r", BEGAN, RUNS_NOW, PREEMPTED, AGAIN)
    ledger.bucket.write_lease("pod:1", ledger.bucket.read_lease().generation)
    monkeypatch.setattr(FakeProvider, "withdraw_unused", lambda provider: pytest.fail("they are another machine's"))
    monkeypatch.setattr(specification, "hash_configuration", lambda config: "hash")
    monkeypatch.setattr(launch.local, "check", lambda config: None)
    monkeypatch.setattr(launch.local, "image", lambda config, say: Image("r/i@sha256:" + "0" * 64))
    request = launch.RunRequest(specification.read(ledger.folder).config(), preflight=False)
    with pytest.raises(LaunchError, match="run r is supervised by pod:1"):
        launch.run(request, replace(work.context(TOKEN="x"), home=work.folder / "laptop"))


@pytest.mark.parametrize("other", [True, False], ids=["another machine", "a dead process of this folder"])
def test_a_lease_means_that_another_machine_supervises_the_run(work: Workstation, other: bool) -> None:
    ledger = begin(work, "r", BEGAN, RUNS_NOW)
    ledger.bucket.write_lease("pod:1" if other else ledger.holder, ledger.bucket.read_lease().generation)
    assert ledger.supervised() == other


def test_a_decision_that_only_the_bucket_holds_counts_once(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = begin(work, "r")
    before = len(ledger.events())
    monkeypatch.setattr(ledger, "clock", clock := Clock())
    with monkeypatch.context() as full:
        full.setattr(ledger_module, "write_whole", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(LaunchError, match="No space left"):
            ledger.append(AttemptBegan(0), patience=0.0)
    clock.sleep(60.0)
    ledger.append(AttemptBegan(0))
    ledger.append(Started(0))
    assert ledger.events()[before:] == [AttemptBegan(0), Started(0)]
    assert ledger.bucket.read_event(before + 3) is None


def test_lines_with_a_secret_that_the_supervisor_can_not_mask_do_not_go_to_the_bucket(work: Workstation) -> None:
    begin(work, "r", BEGAN, RUNS_NOW)
    set_container(work, "r", "exited", 1)
    work.hosts.line = "the token is s3cret"
    assert take_over(work).verdict.kind is Kind.FAILED
    assert "s3cret" in work.ledger.log_file(0, 0).read_text(), "its own folder has the lines"
    assert not any(b"s3cret" in storage.read(each.url) for each in storage.listing(f"{RUNS}/r"))


def watch(work: Workstation, looks: int, stream: Any = pytest.fail, after_look: Any = lambda _: None) -> None:
    """Supervises RUNS, and ends that after some looks, as Ctrl-C does. `stream`: what starts a process."""
    clock = Clock()
    machine = replace(this_machine(), clock=clock, stream=stream)
    watching = Supervisor(RUNS, replace(work.context(), machine=machine), require_programs)
    ends = [clock.now + supervisor.POLL_SECONDS * look - 1 for look in range(1, looks + 1)]
    clock.events = [(end, lambda: after_look(watching)) for end in ends]
    clock.events.append((ends[-1], Mock(side_effect=KeyboardInterrupt)))
    watching.watch()


def test_a_supervisor_starts_a_process_for_each_unfinished_run(work: Workstation, server: BucketServer) -> None:
    live, _, _, held = (begin(work, name, BEGAN, RUNS_NOW) for name in ("live", "damaged", "half", "held"))
    begin(work, "over", BEGAN, RUNS_NOW, Ended(0, "finished"))
    storage.write(f"{RUNS}/damaged/launcher/lease.json", b"{")
    storage.write(f"{RUNS}/half/launcher/run.json", b'{"run_id": "ha')
    started: list[str] = []

    def stream(argv: Sequence[str], on_line: Callable[[str], None], **options: Any) -> Result:
        started.append(argv[-1])
        return Result(tuple(argv), 24, "", "")

    requests = len(server.requests)
    with supervising(held, this_machine(), work.messages.append):
        watch(work, 9, stream)
    assert started == [f"{RUNS}/live"] * 3, "after 0, 30 and 90 seconds, not at each look"
    for name in "damaged", "half":
        assert sum(text.startswith(f"run {name}: its ledger can't be read") for text in work.messages) == 1
    of_finished = [path for _, path, _ in server.requests[requests:] if "%2Fover%2F" in path or "/over/" in path]
    assert 0 < len(of_finished) < 14, "a finished run is looked at once"
    assert f"run {live.run_id}: its process ended with 24" in work.messages


def test_ctrl_c_ends_the_processes_that_run(work: Workstation) -> None:
    for name, *end in ["live"], ["gone"], ["over", Ended(0, "finished")]:
        begin(work, name, BEGAN, RUNS_NOW, *end)
    is_ended = threading.Event()

    def stream(argv: Sequence[str], on_line: Callable[[str], None], **options: Any) -> Result:
        is_live = argv[-1].endswith("/live")
        options["on_start"](is_ended.set if is_live else pytest.fail)
        on_line("   1 s  run live: watched" if is_live else "   1 s  no slice")
        return Result((), int(is_live and not is_ended.wait(20)), "", "")

    watch(work, 1, stream, lambda watching: wait_until(watching._children["gone"].result.done))
    assert is_ended.is_set()
    told = {"run live: watched", "run gone: no slice", "ending: 1 runs continue without this supervisor"}
    assert told <= {*work.messages}


def test_a_supervisor_without_the_programs_leaves_the_lease(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = begin(work, "gke", BEGAN, RUNS_NOW, provider="gke").bucket
    before = bucket.read_lease().generation
    monkeypatch.setenv("PATH", str(work.folder))
    watch(work, 4)
    (told,) = (text for text in work.messages if text.startswith("run gke: "))
    assert told.startswith("run gke: left to supervisors elsewhere: kubectl was not found on PATH: install kubectl ")
    with pytest.raises(CommandMissing):
        cli.main(["supervise", f"{RUNS}/gke"], standalone_mode=False)
    assert bucket.read_lease().generation == before


def test_a_look_at_a_stopped_run_costs_one_request_and_no_overlay(work: Workstation, server: BucketServer) -> None:
    for number in range(16):
        begin(work, str(number), BEGAN, RUNS_NOW, STOPPED, Ended(0, "saved"))
        storage.write(f"{RUNS}/{number}/launcher/overlays/overlay-0.tar.gz", b"large")
    together = threading.Barrier(8)
    leases = itertools.count()

    def meet(request: Any) -> None:
        if "lease.json" in request.path and next(leases) < 8:
            together.wait(10)  # fails where looks wait for each other

    server.fault, looks = meet, [len(server.requests)]
    watch(work, 3, after_look=lambda _: looks.append(len(server.requests)))
    assert not together.broken
    assert [later - before for before, later in itertools.pairwise(looks)][1:] == [17, 17], "a list, and one each"
    assert not any("overlay-0" in path for _, path, _ in server.requests[looks[0] :])


def test_commands_take_a_run_of_a_bucket_on_any_machine(work: Workstation, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = begin(work, "r", BEGAN, RUNS_NOW, PREEMPTED, AGAIN).bucket
    begin(work, "new")

    def call(*arguments: str) -> Any:
        cli(arguments, standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    assert call("list", RUNS, "--json") == [
        {"run": "new", "slice": "s", "attempt": None, "state": "never started", "supervised by": ""},
        {"run": "r", "slice": "s", "attempt": 0, "state": "recovering after preempted", "supervised by": ""},
    ]
    for option in ("--run", f"{RUNS}/r"), ("-f", f"{RUNS}/r/"):
        found = [entry["event"] for entry in call("events", *option, "--json")]
        assert found == ["supervised", "attempt", "started", "ended", "recover"]
    with pytest.raises(BadInput, match=f"{RUNS}/absent is no run that another machine can go on with"):
        call("events", "-f", f"{RUNS}/absent")
    for file in storage.listing(f"{RUNS}/r/launcher"):
        storage.write(file.url.replace("/r/", "/copy/"), storage.read(file.url))
    with pytest.raises(BadInput, match=f"{RUNS}/copy was copied: the run's folder is {RUNS}/r/launcher"):
        call("events", "-f", f"{RUNS}/copy")
    assert not (work.home / "runs" / "copy").exists(), "a copy that has the run's name is not written over the run"
    storage.write(f"{RUNS}/damaged/launcher/run.json", b"[]")
    assert [row["state"][:5] for row in call("list", RUNS, "--json")] == ["can't", "can't", "never", "recov"]
    with pytest.raises(BadInput, match="--set changes keys of a file"):
        call("events", "-f", f"{RUNS}/r", "--set", "train.steps=3")
    for option in "--run", "-f":
        with pytest.raises(BadInput, match="has the command with which it was started"):
            call("run", option, f"{RUNS}/r", "--", "python", "other.py")
    assert not bucket.read_lease().holder, "looking takes no lease"


def test_the_ledger_is_in_the_outputs_bucket_if_this_account_may_write(work: Workstation, server: BucketServer) -> None:
    spec = specification.read(begin(work, "other").folder)

    def is_shared(output: str | None) -> bool:
        config: Any = replace(spec.config(), trainer=output and SimpleNamespace(output=output))
        record = resolve_run(config, work.context(), spec, None, run_id=None, new=True).record
        assert record.bucket in ("", f"{RUNS}/{record.run_id}/launcher")
        assert bool(record.bucket) == bool(record.user) == bool(record.account), "it names its user"
        return bool(record.bucket)

    assert [is_shared(output) for output in (f"{RUNS}/", "/data/runs", None)] == [True, False, False]
    assert not work.messages
    server.fault = lambda request: HttpResponse(403)
    assert not is_shared(RUNS)
    server.fault = lambda request: HttpResponse(403) if int(request.query.get("ifGenerationMatch", 0)) else None
    assert not is_shared(RUNS), "objects may be created there, but not replaced, as the lease must be"
    assert len(work.messages) == 2
    for text in work.messages:
        assert "only this machine can supervise it, because its events can't be kept in its bucket" in text


@pytest.mark.parametrize("command", ["supervise", "list"])
def test_a_folder_that_is_in_no_bucket_is_refused(command: str) -> None:
    with pytest.raises(BadInput, match="name the folder of the runs in their bucket"):
        cli.main([command, "runs"], standalone_mode=False)
