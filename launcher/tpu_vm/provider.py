"""The provider for Cloud TPU VMs: slices through gcloud, hosts through gcloud and ssh connections, containers through
their engine.

One `gcloud ... ssh --worker=all` creates and starts the containers of all hosts. Frequent commands (observe, stop) use
connections that stay open, and gcloud where those can't be opened.
"""

import base64
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher.config import Config
from launcher.container_output import LogWindow
from launcher.errors import HostsUnreachable, LaunchError
from launcher.gcloud import Conflict, PermissionDenied, Preempted, Retry, call_gcloud, explain_error
from launcher.provider import Attempt, CommandReport, HostReport, Observation, SliceState
from launcher.tpu_vm import CAPABILITIES, candidates, commands, deletion, host_scripts, slices
from launcher.tpu_vm.connections import HostResult, SliceConnections
from launcher.tpu_vm.execution import Execution
from launcher.workstation import Workstation
from training.machine import Clock

_COMMAND_SECONDS = 20.0  # for a short command on a host
_FIRST_CONTACT_SECONDS = 300.0
# For each try. Short at first: a gcloud whose key upload met another change of the node (409) tries for 50 s to log in
# without it. Then longer: where a key takes 12 s to propagate, no call of 10 s succeeds.
_ONE_CONTACT_SECONDS, _LONGEST_CONTACT_SECONDS = 10.0, 60.0
_TAIL = 5000  # lines of one observation
_LONG_LOG_SECONDS = 150.0  # more: the engine finds a time in a log of 4 GB by reading all lines before it
_SECRETS_SECONDS = 60.0


class TpuVm:
    """One slice of Cloud TPU VMs, as the configuration describes it. See `launcher.provider.Provider`."""

    capabilities = CAPABILITIES

    def __init__(self, config: Config, say: Callable[[str], None], machine: Workstation) -> None:
        self._wanted = config
        self.say = say
        self._machine = machine
        self._connections = SliceConnections(config, machine)

    @property
    def config(self) -> Config:
        """Returns the configuration of the candidate as which the slice was last seen, else of the first one."""
        return self._connections.config

    @property
    def host_count(self) -> int:
        return self.config.accelerator.hosts

    # -- the slice ----------------------------------------------------------------------------------------------------

    def describe(self) -> SliceState | None:
        """Asks the API for the slice; None without one. Drops kept addresses (on disk too) and connections if they are
        another slice's, and saves which candidate it is. Raises LaunchError if Google does not answer."""
        state = slices.describe(self._wanted, self._machine)
        self._connections.note_state(state)
        return state

    def identity(self) -> tuple[str, str]:
        """Returns creation time and host 0's internal address, as last described or kept; "" twice if unknown."""
        created, hosts = self._connections.identity()
        return created, next(iter(hosts), "")

    def withdraw_unused(self) -> None:
        candidates.withdraw_unused(self._wanted, self.say, self._machine)

    def known_ready(self) -> bool:
        return self._connections.has_known_slice

    def create(self, clock: Clock | None = None) -> None:
        """Drops the kept addresses, waits for the slice, created if needed, and its hosts (with `clock`, whose `sleep`
        may raise), and keeps their new addresses. Tells the user when an interrupt leaves a slice that is billed.
        Raises as `candidates.create` and `_wait_for_hosts`."""
        self.close()  # a new slice has other addresses and keys
        self._connections.forget()
        machine = replace(self._machine, clock=clock or self._machine.clock)
        self._connections.note_state(candidates.create(self._wanted, self.say, machine, self._machine))
        try:
            self._wait_for_hosts(machine)
        except KeyboardInterrupt:
            self.say(
                f"interrupted: slice {self.config.slice.name} exists and is billed: `tpu-launch up` waits for its "
                "hosts, `tpu-launch down` deletes it"
            )
            raise
        self._connections.close()  # a late observation of the last attempt may have opened some
        if not self._connections.gcloud_only:
            with contextlib.suppress(LaunchError):  # then the next command lists the addresses
                self._connections.pool()

    def delete(self) -> None:
        """Deletes the slice (`deletion.delete`) and kept addresses; tells the user if two looks 5 s apart find none."""
        self.close()
        self._connections.forget()
        if deletion.delete(self._wanted, self.say, self._machine):
            return
        self._machine.clock.sleep(deletion.LOOK_AGAIN_SECONDS)  # one answer may be stale
        if not deletion.delete(self._wanted, self.say, self._machine):
            self.say(f"there is no slice {self.config.slice.name}")

    def close(self) -> None:
        self._connections.close()

    def connect(self) -> None:
        self._connections.connect_in_background()

    # -- containers ---------------------------------------------------------------------------------------------------

    def start(self, attempt: Attempt, clock: Clock | None = None) -> list[HostReport]:
        """Starts the containers by one gcloud call (again if kept addresses were those of an earlier slice); if
        `attempt.waits`, delivers overlay and secrets, for which their commands wait. Returns the reports of the first
        step that failed on a host, else those of the start, with image ids as details. Raises LaunchError without a
        slice, if hosts have different images, or none answers; the containers are left. `clock` is unused."""
        reports = self._start_containers(attempt)
        if any(report.detail.startswith(host_scripts.MOVED) for report in reports):
            self._connections.forget()  # they were kept of an earlier slice of this name
            reports = self._start_containers(attempt)
        if not all(report.ok for report in reports):
            return reports
        if len({report.detail for report in reports}) > 1:
            images = "; ".join(f"host {report.worker} has {report.detail}" for report in reports)
            raise LaunchError(f"the hosts do not have the same image: {images}")
        if not attempt.waits(len(reports)):
            return reports
        if (overlay := attempt.overlay) is not None:
            archive = base64.b64encode(overlay.archive).decode()
            script, seconds = host_scripts.overlay_script(attempt), self.config.run.start_minutes * 60
            copied = self._report_all(script, "copied", archive, timeout=seconds)
            if not all(report.ok for report in copied):
                return copied
        secrets = host_scripts.secrets_input(attempt.all_secrets(len(reports)))
        script = host_scripts.secrets_script(attempt)
        delivered = self._report_all(script, "delivered", secrets, timeout=_SECRETS_SECONDS)
        return reports if all(report.ok for report in delivered) else delivered

    def _start_containers(self, attempt: Attempt) -> list[HostReport]:
        """Runs start.sh on all hosts, within run.start_minutes. Returns their reports, with the image id as detail of a
        started container. Warns of hosts whose clock is wrong or that lack huge pages. Raises LaunchError."""
        begin = self._machine.clock.time()
        if not self._connections.identity()[1] and self.describe() is None:
            raise LaunchError(f"slice {self.config.slice.name} does not exist; `tpu-launch up` creates it")
        addresses = self._connections.identity()[1]
        script = host_scripts.start_script(attempt, addresses, self.config.slice.accelerator_type)
        reports = self._run_through_gcloud(script, "started", timeout=self.config.run.start_minutes * 60)
        end = self._machine.clock.time()
        started = []
        for report in reports:
            if report.ok:
                image, time, pages = [*report.detail.split(maxsplit=2), ""][:3]
                for warning in host_scripts.start_warnings(int(time), pages, begin, end):
                    self.say(f"host {report.worker}: {warning}")
                report = replace(report, detail=image)
            started.append(report)
        return started

    def observe(
        self, worker: int, container: str, since: str | None, *, patience: float = 0.0, progress: bool = False
    ) -> Observation:
        """Returns a container's state and its log from `since` on (RFC 3339; None: all), after up to `patience` seconds
        for its end; a log cut at LOG_BYTES sets `more`. Reads the last lines first, and all from `since` only if those
        don't reach back to it. If that fails, a running container still counts as seen, with a `problem`; its lines
        come with a later look. Without an answer, only a `problem`. Raises LaunchError if gcloud gives no addresses."""
        tail = _TAIL if since else None
        script = host_scripts.observe_script(container, since, patience=patience, tail=tail, progress=progress)
        observation, window = self._observe(worker, script, patience)
        is_behind = bool(since and observation.lines and observation.lines[-1].timestamp < since)  # the host's clock
        missing = since and window.records and (observation.more or not host_scripts.covers(window, since, _TAIL))
        if missing and not is_behind:  # else no line from `since` on is new
            told, state = observation.progress, observation.container
            running = None if state is None or state.ended else state
            observation, _ = self._observe(worker, host_scripts.observe_script(container, since), _LONG_LOG_SECONDS)
            observation = replace(observation, progress=told, container=observation.container or running)
        return observation

    def look(self, worker: int, container: str, *, lines: int = 0) -> Observation:
        return self._observe(worker, host_scripts.observe_script(container, None, tail=lines))[0]

    def _observe(self, worker: int, script: str, patience: float = 0.0) -> tuple[Observation, LogWindow]:
        """Runs observe.sh, which waits up to `patience` seconds for the container's end, on a host, by gcloud if ssh is
        refused. Returns the observation, with a `problem` if the host was not reached, and the log that it is from."""
        seconds = _COMMAND_SECONDS + patience
        result = self._connections.run(worker, script, timeout=seconds, gcloud_timeout=patience)
        if not result.reached:
            return Observation(worker, None, problem=result.problem), LogWindow()
        return host_scripts.parse_observation(worker, result.stdout)

    def stop(
        self, container: str, *, grace: int, remove: bool, workers: Sequence[int] | None = None
    ) -> list[HostReport]:
        """Stops the container (SIGTERM, SIGKILL after `grace` seconds) on `workers` (None: all hosts), again where not
        reached, keeps it from starting later, and deletes it if `remove`. Waits for that. Returns reports, also of
        failures. Raises LaunchError if gcloud gives no addresses."""
        script = host_scripts.stop_script(container, grace, remove=remove)
        return self._report_all(script, "stopped", workers=workers, timeout=grace + 30)

    def execute(
        self,
        container: str,
        command: Sequence[str],
        workers: Sequence[int],
        *,
        seconds: float,
        on_line: Callable[[int, str], None],
    ) -> list[CommandReport]:
        """Runs a command in the running container on `workers` at once, never twice, for `seconds` at most, until all
        have ended; passes (worker, line) to `on_line`. Returns how it ended on each. Raises as `Execution.run`."""
        limit = math.ceil(seconds)
        return Execution(self._connections, self._machine, container, command, limit, on_line).run(workers)

    def evidence(self, container: str, workers: Sequence[int]) -> dict[str, str]:
        """Returns texts by file name: the node's description, hosts' diagnostics (unless `gcloud_only`), or errors."""
        command = commands.node_command(self.config, "describe", "--format=json")
        try:
            files = {"slice.json": call_gcloud(self._machine, command, timeout=_COMMAND_SECONDS * 2)}
        except LaunchError as error:
            files = {"slice.json": str(error)}
        if self._connections.gcloud_only:
            return files
        script = host_scripts.render("evidence", container=container)
        try:
            results = self._connections.run_all_over_ssh(script, workers, timeout=30)
        except LaunchError as error:  # not even the hosts' addresses can be found out
            return {**files, "hosts.txt": str(error)}
        return files | {f"host-{result.worker}.txt": _all_output(result) for result in results}

    def stacks(self, container: str, *, native: bool = False) -> dict[int, str]:
        """Returns by worker, for all hosts, the process list and Python stacks (`native`: C's too) of the container, or
        why there are none. Raises LaunchError if gcloud gives no addresses."""
        script = host_scripts.stacks_script(container, native)
        results = self._connections.run_all(script, range(self.host_count), timeout=25)
        return {result.worker: _all_output(result) for result in results}

    # -- all hosts ----------------------------------------------------------------------------------------------------

    def _wait_for_hosts(self, machine: Workstation) -> None:
        """Waits until every host answers over ssh and its engine is up; tells the user which do not yet. gcloud uploads
        the ssh key and learns the host keys on the way. Raises HostsUnreachable after five minutes, PermissionDenied if
        the user may not use a host's engine, Preempted, Conflict or LaunchError if the slice was taken away or deleted
        meanwhile, or can't be described."""
        clock, name = machine.clock, self.config.slice.name
        deadline = clock.monotonic() + _FIRST_CONTACT_SECONDS
        retry = Retry(machine, self.say, f"slice {name}")
        seconds, reported = _ONE_CONTACT_SECONDS, list[str]()
        while missing := self._hosts_not_up(seconds):
            if clock.monotonic() > deadline:
                raise HostsUnreachable(
                    f"slice {name} is READY, but after {_FIRST_CONTACT_SECONDS:.0f} s not all hosts are: "
                    f"{'; '.join(missing)}\n  `tpu-launch up` goes on waiting; `down`, then `up`, recreates it"
                )
            try:
                if (state := retry.call(self.describe, deadline)) is None:  # one answer may be stale
                    clock.sleep(3.0)
                    state = retry.call(self.describe, deadline)
            except LaunchError as error:
                raise LaunchError(
                    f"{error}\n  slice {name} was READY, and is billed: `tpu-launch up` goes on waiting for its hosts, "
                    "`tpu-launch down` deletes it",
                    exit_code=error.exit_code,
                ) from None
            if state is None or state.state == "DELETING":
                raise Conflict(f"slice {name} was deleted as soon as it was READY; `tpu-launch up` creates it again")
            if state.gone_for_good:
                raise Preempted(
                    f"slice {name} is {state.state}: it was taken away as soon as it was READY; run `tpu-launch up` "
                    "again"
                )
            if missing != reported:
                self.say("waiting for the hosts: " + "; ".join(missing))
                reported = missing
            clock.sleep(3.0)
            seconds = min(seconds * 1.5, _LONGEST_CONTACT_SECONDS)

    def _hosts_not_up(self, seconds: float) -> list[str]:
        """Returns why hosts can't be used yet, a line each, or one if gcloud fails; [] if all engines are up. Raises
        PermissionDenied if the user may not use an engine. `seconds`: the time-out; half a second a host is added."""
        timeout = seconds + self.config.accelerator.hosts / 2
        try:
            reports = self._run_through_gcloud(host_scripts.render("check_engine"), "up", timeout=timeout)
        except LaunchError as error:  # guest attributes may still be empty, sshd not up yet
            return [str(error).splitlines()[0]]
        for report in reports:
            if report.detail.startswith(host_scripts.FORBIDDEN):
                raise PermissionDenied(
                    f"host {report.worker}: your user may not use its container engine "
                    f"({report.detail.partition(' ')[2]}): with OS Login, ask for roles/compute.osAdminLogin\n  "
                    f"slice {self.config.slice.name} is billed: `tpu-launch up` goes on with it, `down` deletes it"
                )
        return [f"host {report.worker}: {report.detail}" for report in reports if not report.ok]

    def _run_through_gcloud(self, script: str, word: str, *, timeout: float) -> list[HostReport]:
        """Runs a script on all hosts by one gcloud call. Returns a report of each host, ok if it printed `word`, else a
        failure. Raises CommandTimeout after `timeout` seconds; the error that gcloud's message means if gcloud failed
        and no host reported."""
        argv = commands.ssh_command(self.config, script)
        result = self._machine.run(argv, timeout=timeout)
        if not result.ok and not host_scripts.has_reports(result.stdout):
            raise explain_error(result.stderr, argv[:-1])
        return host_scripts.parse_reports(result.stdout, word, range(self.host_count))

    def _report_all(
        self, script: str, word: str, stdin: str | None = None, workers: Sequence[int] | None = None, *, timeout: float
    ) -> list[HostReport]:
        """Runs a script (it must be safe to run again) on `workers` (None: all hosts), again where not reached.
        `timeout`: seconds of each try. Returns reports in worker order, ok where it printed "tpu-launch WORKER `word`".
        Raises LaunchError if gcloud gives no addresses."""
        chosen = range(self.host_count) if workers is None else workers
        return [
            host_scripts.parse_reports(result.stdout, word, [result.worker])[0]
            if result.reached or host_scripts.has_reports(result.stdout)  # gcloud failed with the script
            else HostReport(result.worker, False, result.problem)
            for result in self._connections.run_all(script, chosen, timeout=timeout, stdin=stdin, again=True)
        ]


def _all_output(result: HostResult) -> str:
    """Returns a host's output, its error output, and why it was not reached, as one text."""
    return f"{result.stdout}{result.stderr}{result.problem}".encode(errors="surrogateescape").decode(errors="replace")
