"""The provider for Cloud TPU VMs: slices through gcloud, hosts through gcloud and Fabric, containers through their
engine.

A container is started on all hosts by one `gcloud ... ssh --worker=all`. Everything that is asked often (looking,
stopping) goes over connections that stay open, and through gcloud where those can't be made.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from launcher import shell
from launcher.config import Config
from launcher.errors import CommandTimeout, Exit, LaunchError
from launcher.images import build as images
from launcher.provider import Attempt, HostReport, Observation, SliceState
from launcher.tpu_vm import CAPABILITIES, gcloud, host_checks, slices
from launcher.tpu_vm import host_scripts as containers
from launcher.tpu_vm.log_window import covers
from launcher.tpu_vm.ssh.addresses import Answer
from launcher.tpu_vm.ssh.connections import Reach
from launcher.tpu_vm.ssh.start_gate import Starting

_LOOK_SECONDS = 20.0
_FIRST_CONTACT_SECONDS = 300.0
_ONE_CONTACT_SECONDS = 10.0  # for each try of it
_TAIL = 5000  # lines of a look
_SECOND_TRY_SECONDS = 3.0  # one hiccup of one connection must not keep a run from starting


class TpuVm:
    """One slice of Cloud TPU VMs, as the file describes it. See `launcher.provider.Provider`."""

    capabilities = CAPABILITIES

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.config = config
        self.say = say
        self._reach = Reach(config)
        self._starting: Starting | None = None

    # -- the slice ----------------------------------------------------------------------------------------------------

    def describe(self) -> SliceState | None:
        found = slices.describe(self.config)
        self._reach.saw(found)
        return found

    def known_ready(self) -> bool:
        return self._reach.remembered

    def create(self) -> None:
        self.close()  # a slice that is made anew has other addresses and keys
        self._reach.forget()
        self._reach.saw(slices.create(self.config, self.say))
        self._first_contact()
        self._reach.close()  # a look of the last attempt may have come back meanwhile
        if not self._reach.through_gcloud_alone:
            with contextlib.suppress(LaunchError):  # then the next command asks
                self._reach.hosts()

    def delete(self) -> None:
        self.close()
        self._reach.forget()
        if not slices.delete(self.config, self.say):
            self.say(f"there is no slice {self.config.slice.name}")

    def close(self) -> None:
        if self._starting is not None:
            self._starting.abandon()
            self._starting = None
        self._reach.close()

    def connect(self) -> None:
        self._reach.begin()

    # -- containers ---------------------------------------------------------------------------------------------------

    def prepare(self, attempt: Attempt) -> list[HostReport]:
        self._begin_start(attempt)
        ready: list[HostReport] = []
        try:
            ready = self._prepare(attempt)
        finally:
            if self._starting is not None and not (ready and all(report.ok for report in ready)):
                self._starting.abandon()
        return ready

    def _prepare(self, attempt: Attempt) -> list[HostReport]:
        self._check(attempt)
        script = containers.prepare_script(attempt, self._addresses(), self.config.slice.accelerator_type)
        ready = self._everywhere(script, "ready", timeout=self.config.run.start_minutes * 60)
        if attempt.overlay is None or not all(report.ok for report in ready):
            return ready
        given = base64.b64encode(attempt.overlay.archive).decode()
        laid = self._hand_over(
            containers.overlay_script(attempt), given, "laid", timeout=self.config.run.start_minutes * 60
        )
        for each in laid:
            if each.ok and each.detail != attempt.overlay.digest:
                raise LaunchError(
                    f"host {each.worker} received another overlay ({each.detail}) than was sent ({attempt.overlay.digest})"
                )
        if not all(each.ok for each in laid):
            return laid
        return [replace(report, detail=f"{report.detail} with overlay {attempt.overlay.digest}") for report in ready]

    def start(self, attempt: Attempt) -> list[HostReport]:
        started = self._go(attempt)
        if not all(report.ok for report in started):
            started = self._through_gcloud(
                containers.start_script(attempt), "started", timeout=self.config.run.start_minutes * 60
            )
        if not attempt.secrets or not all(report.ok for report in started):
            return started
        given = containers.secrets_input(attempt.secrets)
        return self._hand_over(containers.secrets_script(attempt), given, "given", timeout=60)

    def _begin_start(self, attempt: Attempt) -> None:
        """gcloud is on its way to the hosts while they are prepared; there the start waits for `_go`."""
        if not self._reach.through_gcloud_alone:
            argv = gcloud.ssh_command(self.config, containers.start_script(attempt, gated=True))
            self._starting = Starting(argv, timeout=self.config.run.start_minutes * 60)

    def _go(self, attempt: Attempt) -> list[HostReport]:
        """What the hosts that gcloud has reached made of the word; where one did not get it, gcloud is better asked
        again."""
        starting, self._starting = self._starting, None
        every = range(self.config.accelerator.hosts)
        if starting is None:
            return containers.parse_reports("", "started", every)
        if not all(
            self._report(answer, "go").ok
            for answer in self._reach.ask_all(containers.go_script(attempt), timeout=_LOOK_SECONDS)
        ):
            starting.abandon()
        return containers.parse_reports(starting.output(), "started", every)

    def observe(self, worker: int, container: str, since: str | None, *, patience: float = 0.0) -> Observation:
        tail = _TAIL if since else None
        look = self._observe(
            worker, containers.observe_script(container, since, patience=patience, tail=tail), patience
        )
        if since and look.lines and not covers(look.lines, since, _TAIL):
            look = self._observe(
                worker, containers.observe_script(container, since)
            )  # more than that was written since
        return look

    def _observe(self, worker: int, script: str, patience: float = 0.0) -> Observation:
        answer = (
            None
            if self._reach.through_gcloud_alone
            else self._reach.ask(worker, script, timeout=_LOOK_SECONDS + patience)
        )
        if answer is None or answer.refused:
            answer = self._reach.ask_through_gcloud(worker, script)
        if not answer.reached:
            return Observation(worker, None, problem=answer.problem)
        return containers.parse_observation(worker, answer.stdout)

    def stop(
        self, container: str, *, grace: int, remove: bool, workers: Sequence[int] | None = None
    ) -> list[HostReport]:
        script = containers.stop_script(container, grace, remove=remove)
        asked = list(range(self.config.accelerator.hosts)) if workers is None else list(workers)
        answers = (
            [] if self._reach.through_gcloud_alone else self._reach.ask_all(script, timeout=grace + 30, workers=asked)
        )
        if missed := [
            answer.worker for answer in answers if not answer.reached and not answer.refused
        ]:  # nothing may go on for a hiccup
            answers = self._reach.ask_missed(answers, script, timeout=grace + 30, missed=missed)
        if all(answer.refused for answer in answers):
            with ThreadPoolExecutor(max_workers=16) as pool:
                answers = list(pool.map(lambda worker: self._reach.ask_through_gcloud(worker, script), asked))
        return [self._report(answer, "stopped") for answer in answers]

    def evidence(self, container: str, workers: Sequence[int]) -> dict[str, str]:
        try:
            found = {"slice.json": gcloud.call(gcloud.describe_command(self.config), timeout=_LOOK_SECONDS * 2)}
        except LaunchError as error:
            found = {"slice.json": str(error)}
        if not self._reach.through_gcloud_alone:
            answers = self._reach.ask_all(containers.evidence_script(container), timeout=30, workers=workers)
            found |= {f"host-{answer.worker}.txt": answer.stdout + answer.stderr + answer.problem for answer in answers}
        return found

    def stacks(self, container: str) -> dict[int, str]:
        answers = self._reach.ask_all(containers.stacks_script(container), timeout=60)
        return {answer.worker: answer.stdout + answer.stderr + answer.problem for answer in answers}

    def _check(self, attempt: Attempt) -> None:
        """One look at all hosts. Raises LaunchError with a line and a fix for each thing that would make the run fail;
        warns of the rest."""
        if self._reach.through_gcloud_alone:
            return  # a look through gcloud alone costs seconds; `prepare` finds what matters most
        asked = time.time()
        script = host_checks.script(attempt.image, attempt.run_id, containers.LABEL_RUN)
        answers = self._reach.ask_all(script, timeout=_LOOK_SECONDS * 2)
        missed = [answer.worker for answer in answers if not answer.reached]
        if missed and self._starting is not None and (said := self._starting.refusal()):
            raise gcloud.explain(
                said, gcloud.ssh_command(self.config, "...")
            )  # the slice was taken away: hosts need not be asked again
        if missed and not all(answer.refused for answer in answers):
            time.sleep(_SECOND_TRY_SECONDS)
            answers = self._reach.ask_missed(answers, script, timeout=_LOOK_SECONDS, missed=missed)
        if all(answer.refused for answer in answers):
            return  # gcloud may still get through: `prepare` tries
        answered = time.time()
        facts = [
            host_checks.Facts(answer.worker, host_checks.parse(answer.stdout), asked, answered)
            for answer in answers
            if answer.reached
        ]
        needed = None if all(fact.values.get("image") for fact in facts) else images.size(attempt.image)
        found = host_checks.problems(facts, self.config.accelerator.hosts, image_bytes=needed)
        found += [
            host_checks.Problem(a.worker, f"can't be reached: {a.problem}", "`tpu-launch up` waits for it")
            for a in answers
            if not a.reached
        ]
        fatal = [problem for problem in found if problem.fatal]
        if fatal:
            busy = any(problem.occupied_by for problem in fatal)
            raise LaunchError(
                f"the hosts are not ready for a run:\n{host_checks.table(fatal)}",
                exit_code=Exit.CONFLICT if busy else None,
            )
        for problem in found:
            self.say(f"host {problem.worker}: {problem.what}; {problem.fix}")

    def _hand_over(self, script: str, given: str, word: str, *, timeout: float) -> list[HostReport]:
        """A script with standard input, on every host."""
        answers = [] if self._reach.through_gcloud_alone else self._reach.ask_all(script, timeout=timeout, given=given)
        if all(answer.refused for answer in answers):
            with ThreadPoolExecutor(max_workers=16) as pool:
                workers = range(self.config.accelerator.hosts)
                answers = list(pool.map(lambda worker: self._reach.ask_through_gcloud(worker, script, given), workers))
        return [self._report(answer, word) for answer in answers]

    # -- all hosts ----------------------------------------------------------------------------------------------------

    def _addresses(self) -> list[str]:
        internal = self._reach.internal()
        if not internal and self.describe() is None:
            raise LaunchError(f"slice {self.config.slice.name} does not exist; `tpu-launch up` creates it")
        return internal or self._reach.internal()

    def _first_contact(self) -> None:
        """Waits until every host answers over ssh and its engine is up. gcloud spreads the ssh key and learns the host
        keys on the way."""
        deadline = time.monotonic() + _FIRST_CONTACT_SECONDS
        waiting = ""
        while True:
            try:
                # Not longer: a call whose key met another change of the node (409) would try for 50 s to get in without
                # it.
                timeout = _ONE_CONTACT_SECONDS + self.config.accelerator.hosts / 2
                reports = self._through_gcloud(containers.up_script(), "up", timeout=timeout)
                missing = [f"host {report.worker}: {report.detail}" for report in reports if not report.ok]
            except LaunchError as error:  # guest attributes may still be empty, sshd not up yet
                missing = [str(error).splitlines()[0]]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise CommandTimeout(
                    f"slice {self.config.slice.name} is READY, but after {_FIRST_CONTACT_SECONDS:.0f} s not all hosts are: "
                    + "; ".join(missing)
                )
            found = self.describe()
            if found is None or found.gone_for_good:
                raise gcloud.Preempted(
                    f"slice {self.config.slice.name} is {found.state if found else 'gone'}: it was taken away as soon as it came; run `tpu-launch up` again"
                )
            if missing != [waiting]:
                self.say("waiting for the hosts: " + "; ".join(missing))
                waiting = missing[0]
            time.sleep(3.0)

    def _everywhere(self, script: str, word: str, *, timeout: float) -> list[HostReport]:
        """Over open connections; hosts that can't be reached so are asked through gcloud, which also spreads a missing
        key."""
        answers = [] if self._reach.through_gcloud_alone else self._reach.ask_all(script, timeout=timeout)
        if answers and all(answer.reached for answer in answers):
            return [self._report(answer, word) for answer in answers]
        return self._through_gcloud(script, word, timeout=timeout)

    def _through_gcloud(self, script: str, word: str, *, timeout: float) -> list[HostReport]:
        argv = gcloud.ssh_command(self.config, script)
        result = shell.run(argv, timeout=timeout)
        reports = containers.parse_reports(result.stdout, word, range(self.config.accelerator.hosts))
        if (
            not result.ok
            and not any(report.ok for report in reports)
            and all(report.detail == "the host did not answer" for report in reports)
        ):
            raise gcloud.explain(result.stderr, argv[:-1])
        return reports

    @staticmethod
    def _report(answer: Answer, word: str) -> HostReport:
        if not answer.reached:
            return HostReport(answer.worker, False, answer.problem)
        return containers.parse_reports(answer.stdout, word, [answer.worker])[0]
