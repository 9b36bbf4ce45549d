"""The commands of `tpu-launch` that users type, each as a process of its own on a simulated workstation."""

import os
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import NoReturn

from launcher.config import Config
from launcher.errors import Exit, LaunchError, from_disk
from launcher.gke.provider import Gke
from launcher.provider import CommandReport, LogLine, Provider
from launcher.run import execution, launch, logs, status
from launcher.run.ledger import Ledger
from launcher.run.session import Context, Outcome, Output, find_on_slice, import_run, list_runs
from launcher.run.stop import delete_slice, explain_interrupt, stop_run
from launcher.run.supervisor import Supervisor, take_over
from launcher.run.verdict import Kind, explain
from launcher.tpu_vm import candidates, inventory
from launcher.tpu_vm.provider import TpuVm
from tests.simulation.launcher import promises, slice_promises
from tests.simulation.launcher.answers import check_answers
from tests.simulation.launcher.bucket import OUTPUT
from tests.simulation.launcher.jobs import SECRET
from tests.simulation.launcher.machine import make_machine
from tests.simulation.launcher.world import Actor, Laptop, Stop, World
from tests.simulation.scheduler import Event, Killed, Process


class Command(Actor):
    """One command of a user, from its start to its end."""

    def __init__(self, world: World, laptop: Laptop, name: str, config: Config, rng: Random, new: bool = False) -> None:
        super().__init__(laptop, name, Process(f"{laptop.name}:{name}"))
        self.world, self.config, self.new = world, config, new
        self.began = world.scheduler.now
        self.url = ""  # of the run in the bucket that it was given; empty for the newest
        self.run_id = ""  # that it spoke of last
        self.code: int | None = None  # None while it runs, and when it was killed
        self.killed = self.interrupted = False
        self.said: list[str] = []
        self.told: list[tuple[float, str]] = []  # when it said what
        self.lines: Counter[tuple[int, str, str]] = Counter()  # of hosts, that it showed
        self.shows: Path | None = None  # the logs of the attempt that `logs` shows
        self.status: status.Status | None = None
        self.explained = ""  # what `explain` shows
        self.stacks: dict[str, str] = {}  # the files that it has written, by name
        self.attempt = -1  # that it explains
        self.reports: list[CommandReport] = []  # of `exec`
        self.error: LaunchError | None = None
        self.verdict: Kind | None = None
        self.outcome: Outcome | None = None
        self.ended = float("inf")  # virtual time
        self.known_stops: dict[str, int] = {}  # when `run` began, by run
        self.over = Event(world.scheduler, f"the end of {name} of {laptop.name}")
        self.process.enter = self._enter
        self.machine = make_machine(world, self, rng, self._exit)
        output = Output(self._say, self._emit)
        environment = {} if world.cluster else {"HF_TOKEN": SECRET if world.env_file is None else "an older one"}
        self.context = Context(laptop.home, environment, self._make_provider, output, self.machine)
        self.task = world.scheduler.spawn(self._main, name="main", process=self.process)

    def _enter(self) -> None:
        os.environ["TPU_LAUNCH_HOME"] = str(self.laptop.home)
        os.environ["LOGNAME"] = self.laptop.user

    def _make_provider(self, config: Config) -> Provider:
        kind: type[Gke] | type[TpuVm] = Gke if config.provider == "gke" else TpuVm
        return check_answers(kind(config, self._say, self.machine), self)

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.told.append((self.world.scheduler.now, text))
        if any(hole in f"{text}\n" for hole in ("()", "''", "None", ": \n")):
            self.world.break_promise("a message has no holes", text)
        if "values of secrets are missing" in text or "run.secrets: not in the environment" in text:
            self.world.break_promise("secrets reach each host", text)
        if "the budget is spent" in text:
            self.world.record.stops.append(Stop(text.split()[1].rstrip(":,"), self.world.scheduler.now))
        if "deleting its slice" in text or ": recreating the slice (" in text:
            self.deletes_for = text.split()[1].rstrip(":,")
        if text.startswith("run "):
            self.run_id = text.split()[1].rstrip(":,")
        if text.startswith("run ") and ": started on all hosts" in text and (job := self.world.newest_job(self.run_id)):
            job.confirmed = True
        if text.startswith("ending the attempt on all hosts: stalled"):
            promises.stalled_program_is_silent(self.world, self.run_id)
        if text.startswith("ending the attempt on all hosts: host lost"):
            promises.told_silence_is_true(self.world, self, self.run_id, text)
        if text.startswith("no host answers ("):
            promises.told_absence_is_true(self.world, self, text)
        if ": starting again (" in text:
            self.world.reached("recovery")
        if ": not recovered yet: " in text:
            self.world.reached("round")
        self.world.note(f"  {self.name}: {text}")

    def ledgers(self) -> list[Ledger]:
        return list_runs(self.laptop.home, self.machine)

    def _emit(self, worker: int, line: LogLine) -> None:
        self.lines[worker, line.timestamp, line.text] += 1

    # -- from outside -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        if self.code is None and not self.killed:
            self.killed, self.ended = True, self.world.scheduler.now
            self.world.note(f"{self.name} of {self.laptop.name} is killed")
            try:
                self.world.scheduler.kill(self.process)
            finally:
                self.over.set()

    def interrupt(self) -> None:
        """Sends Ctrl-C."""
        if self.code is None and not self.killed:
            self.interrupted = True
            self.world.note(f"Ctrl-C in {self.name} of {self.laptop.name}")
            self.world.scheduler.interrupt(self.task, KeyboardInterrupt())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _exit(self, code: int) -> NoReturn:
        """Ends the process at once, as the loss of its lease does."""
        self.code, self.ended = code, self.world.scheduler.now
        self.world.note(f"{self.name} of {self.laptop.name} exits with {code}")
        self.over.set()
        self.world.scheduler.kill(self.process)
        raise AssertionError

    def _import(self) -> None:
        """Imports the newest run of the bucket, as a command does that is given its URL."""
        if self.world.storage.runs() and self.laptop is self.world.laptops[2]:
            self.run_id = import_run(self.laptop.home, self.machine, self.url or self.world.storage.runs()[-1]).run_id

    def _watch(self) -> int:
        """Supervises all runs of the bucket until it is interrupted."""
        Supervisor(OUTPUT, self.context, require_programs=lambda provider: None).watch()
        return 0

    def _main(self) -> None:
        self.world.note(f"$ tpu-launch {self.name}")
        code: int
        try:
            code = int(getattr(self, f"_{self.name}")())
        except (LaunchError, OSError) as trouble:
            self.error = trouble if isinstance(trouble, LaunchError) else from_disk(trouble)
            if self.error is None:
                raise
            code = int(self.error.exit_code)
            self._say(f"error: {self.error}")
        except KeyboardInterrupt:
            if self.name in ("run", "attach"):
                explain_interrupt(self.config, self.context)
            elif self.name in ("up", "down"):
                self._say("interrupted: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it")
            code = int(Exit.DETACHED)
        except Killed:
            raise
        except BaseException as error:
            code = 1
            trace = "".join(traceback.format_exception(error)[-4:])
            self.world.break_promise("every ending has a documented code", f"traceback of {self.name}: {trace}")
        self.code, self.ended = code, self.world.scheduler.now
        self.world.note(f"{self.name} of {self.laptop.name} ended with {code}")
        self.over.set()
        self.world.scheduler.kill(self.process)  # its background tasks end with it

    def _up(self) -> int:
        provider = self._make_provider(self.config)
        if provider.capabilities.cloud_tpu_node:
            candidates.check_owner(self.config, provider.describe, self.machine.owner)
        provider.create()
        return 0

    def _down(self) -> int:
        self.world.downs.append(self.laptop.user)
        stops = [Stop(ledger.run_id, self.world.scheduler.now) for ledger in self.ledgers()]
        self.world.record.stops += stops  # `down` stops the runs that are under way
        try:
            delete_slice(self.config, self.context)
        finally:
            self.world.downs.remove(self.laptop.user)
        for stop in stops:
            stop.done = self.world.scheduler.now
        return 0

    def _run(self) -> int:
        self.world.record.requested_runs.append((self.laptop, self.world.scheduler.now))
        self.known_stops = {ledger.run_id: ledger.state.stops for ledger in self.ledgers()}
        request = launch.RunRequest(self.config, new=self.new, env_file=self.world.env_file, overlay=self.world.overlay)
        return self._show(launch.run(request, self.context))

    def _attach(self) -> int:
        return self._show(launch.attach(launch.RunRequest(self.config), self.context))

    def _show(self, outcome: Outcome) -> int:
        self.verdict, self.outcome = outcome.verdict.kind, outcome
        job = self.world.record.jobs.get((outcome.run_id, outcome.attempt))
        if job is not None and self.verdict is Kind.FINISHED:
            job.seen_finished = True
        for line in explain(outcome.verdict):
            self._say(line)
        return int(self.verdict.exit_code)

    def _supervise(self) -> int:
        """Takes one run over, as the processes of `watch` do."""
        self._import()
        if not self.run_id:
            return 0
        outcome = take_over(Ledger(self.laptop.home / "runs" / self.run_id, self.machine.clock), self.context)
        return self._show(outcome) if outcome is not None else 0

    def _stop(self) -> int:
        self._import()
        stop = Stop(
            find_on_slice(self.config, self.context, None).run_id, self.world.scheduler.now, None, self, self.began
        )
        self.world.record.stops.append(stop)
        failed = [report for report in stop_run(self.config, self.context, None, grace=None) if not report.ok]
        for report in failed:
            self._say(f"host {report.worker}: {report.detail}")
        if failed:
            return int(Exit.CLOUD_ERROR)
        stop.done = self.world.scheduler.now
        return 0

    def _gc(self) -> int:
        began = self.world.scheduler.now
        listing = inventory.list_owned(self.config.project, self.config.zones, self.machine)
        now, failed = self.machine.clock.time(), 0
        slice_promises.list_shows_what_is(self.world, listing, began, now)
        for item in inventory.find_leftovers(listing.slices, now, owner=self.machine.owner):
            try:
                self._say(f"{item.name}: {inventory.remove(self.config.project, item, self._say, self.machine)}")
            except LaunchError as error:
                self._say(f"{item.name}: {error}")
                failed = int(error.exit_code)
        return int(next(iter(listing.failures.values())).exit_code) if listing.failures else failed

    def _status(self) -> int:
        provider = self._make_provider(self.config)
        if self.config.provider == "tpu-vm":  # `list`, beside it
            began, zones = self.world.scheduler.now, self.config.zones
            listing = inventory.list_owned(self.config.project, zones, self.machine)
            slice_promises.list_shows_what_is(self.world, listing, began, self.machine.clock.time())
        top = status.Top(self.config, self.context, provider)
        for seconds in (5.0, 60.0, 120.0):
            status.render(top.look(), 80, 28)
            self.machine.clock.sleep(seconds)
        self.status = status.read_status(self.config, self.context, provider)
        return 0

    def _logs(self) -> int:
        self._import()
        known = find_on_slice(self.config, self.context, None)
        if known.bucket is None:  # else another attempt may have begun on another machine
            self.shows = known.folder / "logs" / f"attempt-{known.state.attempt}"
        logs.print_logs(self.config, self.context, None, follow=True, host=None)
        return 0

    def _explain(self) -> int:
        with execution.live_session(self.config, self.context, None) as session:
            self.run_id, self.attempt = session.ledger.run_id, session.ledger.state.attempt
            found, folder = execution.explain_run(session)
            self.stacks = {path.stem: path.read_text() for path in Path(folder).glob("*.txt")}
        self.explained = found or ""
        return 0 if found else int(Exit.CLOUD_ERROR)

    def _exec(self) -> int:
        self.reports = execution.execute(self.config, self.context, None, ["work"], host=None, seconds=20.0)
        return execution.exit_code(self.reports)
