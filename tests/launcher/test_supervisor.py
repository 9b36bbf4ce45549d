"""Claims about `tpu-launch supervise` and about commands on a run of a bucket from a machine that has nothing of it."""

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.cli.main import cli
from launcher.emulator.http_server import HttpResponse
from launcher.errors import BadInput, CommandMissing, LaunchError
from launcher.images.build import Image
from launcher.provider import ContainerState, container_name
from launcher.providers import require_programs, this_machine
from launcher.run import events, launch, specification, supervisor
from launcher.run import ledger as ledger_module
from launcher.run.bucket import RunBucket
from launcher.run.events import AttemptBegan, Ended, RunEvent, Started
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.session import Context, Output, _folder_in_bucket, begin_run, import_run, resolve_run, supervising
from launcher.run.specification import Specification
from launcher.run.stop import delete_slice
from launcher.run.supervisor import Supervisor, is_unfinished
from launcher.run.verdict import Cause, Kind
from launcher.shell import Result
from tests.launcher.emulated_gcloud import Clock
from tests.launcher.test_runs import FakeProvider, FastClock, Hosts
from tests.processes import wait_until
from tests.servers import BucketServer
from training import storage
from training.yaml_file import Document

RUNS = "gs://bucket/runs"
RUN = {"command": ["python", "x.py"], "secrets": ["TOKEN"], "preemption_retries": 1, "failure_retries": 0, "budget": 5}
SLICE = {"name": "s", "accelerator_type": "v4-16"}
CONFIGURATION = {"project": "p", "zone": "us-central2-b", "slice": SLICE, "run": RUN}


pytestmark = pytest.mark.usefixtures("server")


def begin(home: Path, run_id: str, *recorded: RunEvent, url: str = "", provider: str = "tpu-vm") -> Ledger:
    """Returns a new run of a machine with these events; its launcher has released the lease."""
    record = RunRecord(run_id, "p", "us-central2-b", "s", "hash", 0.0, provider, bucket=url, user="ann")
    spec = Specification(run="", provider="tpu-vm", file="f.yaml", configuration=CONFIGURATION, secrets=["TOKEN"],
        image="r/i@sha256:" + "0" * 64)  # fmt: skip
    ledger = begin_run(home, replace(this_machine(), clock=FastClock()), record, "a: 1", spec, None)
    with supervising(ledger, this_machine(), pytest.fail):
        for event in recorded:
            ledger.append(event)
            ledger.clock.sleep(60.0)
    return ledger


def context(home: Path, hosts: Hosts, said: list[str], **secrets: str) -> Context:
    """Returns the context of a command on another machine, whose clock jumps over waits."""
    output = Output(said.append, lambda worker, line: None)
    machine = replace(this_machine(), clock=FastClock())
    return Context(home, secrets, lambda config: FakeProvider(config, hosts), output, machine)


BEGAN, RUNS_NOW, PREEMPTED = AttemptBegan(0), Started(0), Ended(0, "preempted", Cause(-1, "the slice is PREEMPTED"))
COSTLY = AttemptBegan(0, dollars_an_hour=1e9)
STOPPED, SPENT = events.RunStopRequested(0), events.RunStopRequested(0, by_budget=True)
AGAIN = events.Recovering(0, "preempted", "preemption 1 of 1", 0.0)
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
def test_a_run_has_to_go_on_unless_it_is_over(tmp_path: Path, recorded: list[RunEvent], unfinished: bool) -> None:
    assert is_unfinished(begin(tmp_path, "r", *recorded), 0.0) is unfinished


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
def test_a_dead_launchers_run_goes_on(tmp_path: Path, recorded: list[RunEvent], running: str, attempts: int) -> None:
    url = f"{RUNS}/r/launcher"
    begin(tmp_path / "laptop", "r", *recorded, url=url)
    hosts = Hosts([0], state={container_name("r", 0): ContainerState(running)})
    if running == "running":
        end = hosts.change(state={container_name("r", 0): ContainerState("exited", 0)})
        hosts.hooks["observe"] = [lambda: None] * 4 + [end]
    hosts.slice_state = "READY" if running != "absent" else "PREEMPTED"
    ledger, said = import_run(tmp_path / "pod", this_machine(), f"{RUNS}/r"), list[str]()

    def take_over(**secrets: str) -> Any:
        return supervisor.take_over(ledger, context(tmp_path / "pod", hosts, said, **secrets))

    if attempts:
        with pytest.raises(BadInput, match=r"attempt 1 is not started: values of secrets are missing .*: TOKEN"):
            take_over()
        assert any("no other attempt starts without them: ann set them on" in text for text in said)
    outcome = take_over(TOKEN="s3cret")
    assert (outcome.attempt, outcome.verdict.kind) == (attempts, Kind.FINISHED), said
    assert [attempt.number for attempt in hosts.attempts] == [1] * attempts
    assert hosts.calls.count("create") == attempts, "the slice may be gone"
    found = [storage.read(each.url) for each in storage.listing(f"{url}/events")]
    assert len(found) == len(ledger.entries())
    assert not any(b"s3cret" in text for text in found)
    assert take_over(TOKEN="s3cret") is None, "nothing is left to do"


def test_a_supervisor_deletes_the_slice_of_a_run_whose_launcher_died_after_its_budget_was_spent(tmp_path: Path) -> None:
    begin(tmp_path / "laptop", "r", BEGAN, RUNS_NOW, SPENT, Ended(0, "saved"), url=f"{RUNS}/r/launcher")
    hosts, said = Hosts([]), list[str]()
    ledger, pod = import_run(tmp_path / "pod", this_machine(), f"{RUNS}/r"), context(tmp_path / "pod", hosts, said)
    assert supervisor.take_over(ledger, pod) is None
    assert hosts.slice_state is None, said
    assert supervisor.take_over(ledger, pod) is None
    assert (hosts.calls, hosts.withdrawals) == (["delete"], 1)
    begin(tmp_path / "laptop", "open", BEGAN, RUNS_NOW, SPENT, url=f"{RUNS}/open/launcher")
    hosts = Hosts([], state={container_name("open", 0): ContainerState("exited", 75)})
    ledger, pod = import_run(tmp_path / "pod", this_machine(), f"{RUNS}/open"), context(tmp_path / "pod", hosts, said)
    assert supervisor.take_over(ledger, pod).verdict.kind is Kind.SAVED, "its attempt saves first"
    assert hosts.slice_state is None


@pytest.mark.parametrize("created", ["2026-01-01T00:00:00Z", "2026-02-02T00:00:00Z"])
@pytest.mark.parametrize("why", ["stopped", "spent", "replaced"])
def test_an_interrupted_deletion_goes_on_for_the_recorded_slice_only(tmp_path: Path, created: str, why: str) -> None:
    first, replaces = "2026-01-01T00:00:00Z", why == "replaced"
    recorded = {
        "stopped": [BEGAN, RUNS_NOW, replace(SPENT, slice_created=first), Ended(0, "saved")],
        "spent": [COSTLY, Started(0, slice_created=first), Ended(0, "failed")],
        "replaced": [BEGAN, RUNS_NOW, Ended(0, "host lost"), AGAIN, events.SliceReplaced(0, 1, "?", first)],
    }[why]
    begin(tmp_path / "laptop", "r", *recorded, url=f"{RUNS}/r/launcher")
    hosts, said = Hosts([0], created=created), list[str]()
    ledger = import_run(tmp_path / "pod", this_machine(), f"{RUNS}/r")
    supervisor.take_over(ledger, context(tmp_path / "pod", hosts, said, TOKEN="x"))
    is_recorded = created == "2026-01-01T00:00:00Z"
    assert ("delete" in hosts.calls) == is_recorded, said
    assert any("is not the one to delete: it was created at 2026-02-02" in text for text in said) == (not is_recorded)
    assert ("start" in hosts.calls) == replaces


def test_down_deletes_the_slice_although_the_run_s_bucket_refuses(tmp_path: Path, server: BucketServer) -> None:
    ledger = begin(tmp_path, "r", BEGAN, RUNS_NOW, url=f"{RUNS}/r/launcher")
    hosts, said = Hosts([], state={container_name("r", 0): ContainerState("exited", 75)}), list[str]()
    server.fault = lambda request: HttpResponse(403)
    delete_slice(specification.read(ledger.folder).config(), context(tmp_path, hosts, said))
    assert hosts.calls == ["stop", "delete"]
    assert any("run r: its stop can't be recorded" in text for text in said)


def test_a_run_that_another_machine_supervises_keeps_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = begin(tmp_path, "r", BEGAN, RUNS_NOW, PREEMPTED, AGAIN, url=f"{RUNS}/r/launcher")
    lease = ledger.bucket.read_lease()
    ledger.bucket.write_lease("pod:1", lease.generation)
    monkeypatch.setattr(FakeProvider, "withdraw_unused", lambda provider: pytest.fail("they are another machine's"))
    monkeypatch.setattr(specification, "hash_configuration", lambda config: "hash")
    monkeypatch.setattr(launch.local, "check", lambda config: None)
    monkeypatch.setattr(launch.local, "image", lambda config, say: Image("r/i@sha256:" + "0" * 64))
    config = specification.read(ledger.folder).config()
    with pytest.raises(LaunchError, match="run r is supervised by pod:1"):
        launch.run(launch.RunRequest(config, preflight=False), context(tmp_path, Hosts([]), [], TOKEN="x"))


@pytest.mark.parametrize("other", [True, False], ids=["another machine", "a dead process of this folder"])
def test_a_lease_means_that_another_machine_supervises_the_run(tmp_path: Path, other: bool) -> None:
    ledger = begin(tmp_path, "r", BEGAN, RUNS_NOW, url=f"{RUNS}/r/launcher")
    ledger.bucket.write_lease("pod:1" if other else ledger.holder, ledger.bucket.read_lease().generation)
    assert ledger.supervised() == other


def test_a_decision_that_only_the_bucket_can_hold_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, write = begin(tmp_path, "r", url=f"{RUNS}/r/launcher"), ledger_module.write_whole

    def refuse(file: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(ledger.events())
    monkeypatch.setattr(ledger, "clock", clock := Clock())
    monkeypatch.setattr(ledger_module, "write_whole", refuse)
    with pytest.raises(LaunchError, match="No space left"):
        ledger.append(AttemptBegan(0), patience=0.0)
    monkeypatch.setattr(ledger_module, "write_whole", write)
    clock.sleep(60.0)
    ledger.append(AttemptBegan(0))
    ledger.append(Started(0))
    assert ledger.events()[before:] == [AttemptBegan(0), Started(0)]
    assert ledger.bucket.read_event(before + 3) is None


def test_lines_with_a_secret_that_the_supervisor_can_not_mask_do_not_go_to_the_bucket(tmp_path: Path) -> None:
    url = f"{RUNS}/r/launcher"
    begin(tmp_path / "laptop", "r", BEGAN, RUNS_NOW, url=url)
    hosts = Hosts([], state={container_name("r", 0): ContainerState("exited", 1)}, line="the token is s3cret")
    ledger = import_run(tmp_path / "pod", this_machine(), f"{RUNS}/r")
    outcome = supervisor.take_over(ledger, context(tmp_path / "pod", hosts, []))
    assert outcome.verdict.kind is Kind.FAILED
    assert "s3cret" in ledger.log_file(0, 0).read_text(), "its own folder has the lines"
    assert not any(b"s3cret" in storage.read(each.url) for each in storage.listing(url))


class _Enough(Exception):
    """Ends the supervisor of a test."""


class _Clock(Clock):
    """Ends the supervisor after some looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if seconds == supervisor.POLL_SECONDS:
            self.looks -= 1
            if not self.looks:
                raise _Enough


def watch(home: Path, said: list[str], clock: _Clock, stream: Callable[..., Result] = pytest.fail) -> None:
    """Supervises RUNS, with no provider, until the clock ends it. `stream`: what starts a process."""
    machine = replace(this_machine(), clock=clock, stream=stream)
    context = Context(home, {}, pytest.fail, Output(said.append, pytest.fail), machine)
    with pytest.raises(_Enough):
        Supervisor(RUNS, context, require_programs).watch()


def test_a_supervisor_starts_a_process_for_each_unfinished_run(tmp_path: Path, server: BucketServer) -> None:
    begin(tmp_path / "laptop", "live", BEGAN, RUNS_NOW, url=f"{RUNS}/live/launcher")
    begin(tmp_path / "laptop", "over", BEGAN, RUNS_NOW, Ended(0, "finished"), url=f"{RUNS}/over/launcher")
    begin(tmp_path / "laptop", "damaged", BEGAN, RUNS_NOW, url=f"{RUNS}/damaged/launcher")
    storage.write(f"{RUNS}/damaged/launcher/lease.json", b"{")
    begin(tmp_path / "laptop", "half", BEGAN, RUNS_NOW, url=f"{RUNS}/half/launcher")
    storage.write(f"{RUNS}/half/launcher/run.json", b'{"run_id": "ha')
    held = begin(tmp_path / "laptop", "held", BEGAN, RUNS_NOW, url=f"{RUNS}/held/launcher")
    started: list[str] = []

    def stream(argv: Sequence[str], on_line: Callable[[str], None], **options: Any) -> Result:
        started.append(argv[-1])
        return Result(tuple(argv), 24, "", "")

    requests, said = len(server.requests), list[str]()
    with supervising(held, this_machine(), said.append):
        watch(tmp_path / "pod", said, _Clock(looks=9), stream)
    assert set(started) == {f"{RUNS}/live"}
    for name in "damaged", "half":
        assert len([text for text in said if text.startswith(f"run {name}: its ledger can't be read")]) == 1, said
    assert len(started) == 3, "after 0, 30 and 90 seconds, not at each look"
    of_finished = [path for _, path, _ in server.requests[requests:] if "%2Fover%2F" in path or "/over/" in path]
    assert 0 < len(of_finished) < 20, "a finished run is looked at once"
    assert "run live: its process ended with 24" in said


def test_ctrl_c_ends_the_processes_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, *end in ["live"], ["gone"], ["over", Ended(0, "finished")]:
        begin(tmp_path / "laptop", name, BEGAN, RUNS_NOW, *end, url=f"{RUNS}/{name}/launcher")
    said, is_ended = list[str](), threading.Event()

    def stream(argv: Sequence[str], on_line: Callable[[str], None], **options: Any) -> Result:
        is_live = argv[-1].endswith("/live")
        options["on_start"](is_ended.set if is_live else pytest.fail)
        on_line("   1 s  run live: watched" if is_live else "   1 s  no slice")
        return Result((), int(is_live and not is_ended.wait(20)), "", "")

    def interrupt(_seconds: float) -> None:
        wait_until(lambda: watching._children["gone"].result.done())
        raise KeyboardInterrupt

    pod = context(tmp_path / "pod", Hosts([]), said)
    monkeypatch.setattr(pod.machine.clock, "sleep", interrupt)
    watching = Supervisor(RUNS, replace(pod, machine=replace(pod.machine, stream=stream)), lambda provider: None)
    watching.watch()
    assert is_ended.is_set()
    assert {"run live: watched", "run gone: no slice", "ending: 1 runs continue without this supervisor"} <= {*said}


def test_a_supervisor_without_the_programs_leaves_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{RUNS}/gke/launcher"
    begin(tmp_path / "laptop", "gke", BEGAN, RUNS_NOW, url=url, provider="gke")
    before = RunBucket(url).read_lease().generation
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    watch(tmp_path / "pod", said, _Clock(looks=4))
    assert [text for text in said if text.startswith("run gke: ")] == [
        "run gke: left to supervisors elsewhere: kubectl was not found on PATH: install kubectl "
        "(https://kubernetes.io/docs/tasks/tools/)"
    ]
    with pytest.raises(CommandMissing):
        cli.main(["supervise", f"{RUNS}/gke"], standalone_mode=False)
    assert RunBucket(url).read_lease().generation == before


def test_a_look_at_a_stopped_run_costs_one_request_and_no_overlay(tmp_path: Path, server: BucketServer) -> None:
    for number in range(16):
        url = f"{RUNS}/{number}/launcher"
        begin(tmp_path / "laptop", str(number), BEGAN, RUNS_NOW, STOPPED, Ended(0, "saved"), url=url)
        storage.write(f"{url}/overlays/overlay-0.tar.gz", b"large")
    together, waiting, alone = threading.Event(), list[str](), list[str]()

    def meet(request: Any) -> None:
        if "lease.json" in request.path and not together.is_set():
            waiting.append(request.path)
            if len(waiting) == 8 or not together.wait(10):
                alone.extend(waiting[:1] if not together.is_set() and len(waiting) < 8 else [])
                together.set()

    class CountingClock(_Clock):
        def sleep(self, seconds: float) -> None:
            looks.append(len(server.requests))
            super().sleep(seconds)

    server.fault, looks = meet, [len(server.requests)]
    watch(tmp_path / "pod", [], CountingClock(looks=3))
    assert not alone, "looks wait for each other"
    assert [later - before for before, later in itertools.pairwise(looks)][1:] == [17, 17], "a list, and one each"
    assert not any("overlay-0" in path for _, path, _ in server.requests[looks[0] :])


def test_commands_take_a_run_of_a_bucket_on_any_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path / "laptop", "r", BEGAN, RUNS_NOW, PREEMPTED, AGAIN, url=f"{RUNS}/r/launcher")

    def call(*arguments: str) -> Any:
        cli(arguments, standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    assert call("list", RUNS, "--json") == [
        {"run": "r", "slice": "s", "attempt": 0, "state": "recovering after preempted", "supervised by": ""}
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
    with pytest.raises(BadInput, match="--set changes keys of a file"):
        call("events", "-f", f"{RUNS}/r", "--set", "train.steps=3")
    lease = RunBucket(f"{RUNS}/r/launcher").read_lease()
    assert not lease.holder, "looking takes no lease"


@pytest.mark.parametrize("output", [RUNS, "/data/runs"])
def test_a_run_that_another_machine_may_supervise_names_its_user(tmp_path: Path, output: str) -> None:
    spec = specification.read(begin(tmp_path, "other").folder)
    config: Any = replace(spec.config(), trainer=SimpleNamespace(output=output))
    work = context(tmp_path, Hosts([]), [])
    record = resolve_run(config, work, spec, None, run_id=None, new=True).record
    assert bool(record.bucket) == bool(record.user) == bool(record.account) == (output == RUNS)


def test_the_ledger_is_in_the_bucket_if_the_output_is_and_this_account_may_write_there(server: BucketServer) -> None:
    def folder(output: str | None) -> str:
        trainer = None if output is None else SimpleNamespace(output=output)
        config: Any = SimpleNamespace(trainer=trainer, document=Document("f.yaml", {"a": 1}, {}))
        return _folder_in_bucket(config, "r", said.append)

    said: list[str] = []
    assert folder(f"{RUNS}/") == f"{RUNS}/r/launcher"
    assert folder("/data/runs") == folder(None) == ""
    server.fault = lambda request: HttpResponse(403)
    assert not said
    assert folder(RUNS) == ""
    server.fault = lambda request: HttpResponse(403) if int(request.query.get("ifGenerationMatch", 0)) else None
    assert folder(RUNS) == "", "objects may be created there, but not replaced, as the lease must be"
    assert len(said) == 2
    for text in said:
        assert "run r: only this machine can supervise it, because its events can't be kept in its bucket" in text


@pytest.mark.parametrize("command", ["supervise", "list"])
def test_a_folder_that_is_in_no_bucket_is_refused(command: str) -> None:
    with pytest.raises(BadInput, match="name the folder of the runs in their bucket"):
        cli.main([command, "runs"], standalone_mode=False)
