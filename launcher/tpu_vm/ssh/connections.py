"""The way to the hosts of one slice: where they are, as remembered or as gcloud says, and one set of connections that
all threads use.

What an earlier command remembered is a hint. Where hosts do not answer there, gcloud is asked once whether they are
elsewhere by now; a slice that turns out to be another one makes it void. The lock is held for moments, never while
gcloud or a host is waited for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from launcher import shell
from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.provider import SliceState
from launcher.tpu_vm import gcloud
from launcher.tpu_vm.ssh import addresses
from launcher.tpu_vm.ssh.addresses import Answer, Known

if TYPE_CHECKING:  # it imports Fabric: a start must not wait for that
    from launcher.tpu_vm.ssh.sessions import Hosts

_GCLOUD_SECONDS = 40.0  # for one call


class Reach:
    """The hosts of the slice that the file describes. Threads may ask at once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.through_gcloud_alone = config.run.transport == "gcloud" or config.slice.iap
        self._lock = threading.Lock()  # of the four that follow
        self._seen: SliceState | None = None  # as last described
        self._remembered = None if self.through_gcloud_alone else addresses.recall(config)
        self._hosts: Hosts | None = None
        self._doubtful: Known | None = (
            None  # what the connections' addresses were taken from, until gcloud has been asked about it
        )
        self._listing = threading.Lock()  # one thread finds out where the hosts are, others wait for it
        self._dialling: Future[None] | None = None

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def remembered(self) -> bool:
        """Whether an earlier command saw this slice READY, and nothing has spoken against it since."""
        with self._lock:
            return self._remembered is not None

    def saw(self, found: SliceState | None) -> None:
        """The slice was described: what is remembered of another one is void."""
        with self._lock:
            self._seen, known = found, self._remembered
        if known is not None and (found is None or (found.created, found.hosts) != (known.created, known.internal)):
            self.forget()

    def internal(self) -> list[str]:
        """The addresses by which hosts know each other, in worker order; empty when the slice must be described
        first."""
        with self._lock:
            if self._seen is not None:
                return list(self._seen.hosts)
            return list(self._remembered.internal) if self._remembered is not None else []

    def forget(self) -> None:
        """Nothing that is remembered of the slice holds any more, nor do the connections."""
        with self._lock:
            void, self._hosts = self._hosts, None
            self._remembered = self._doubtful = None
        addresses.forget(self.config)
        if void is not None:
            void.close()

    def close(self) -> None:
        """Closes what is open; a later question opens it again."""
        self._dialled()
        with self._lock:
            hosts, self._hosts, self._doubtful = self._hosts, None, None
        if hosts is not None:
            hosts.close()

    # -- asking -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Dials all hosts in the background, while other things are looked at; what fails is tried again when it is
        needed."""
        if not self.through_gcloud_alone:
            self._dialling = ThreadPoolExecutor(1).submit(lambda: self._listed().connect_all())

    def hosts(self) -> Hosts:
        """All hosts, connected or to be connected when asked. Raises LaunchError when gcloud can't say where they
        are."""
        self._dialled()
        return self._listed()

    def ask(self, worker: int, script: str, *, timeout: float) -> Answer:
        hosts = self.hosts()
        answer = hosts.ask(worker, script, timeout=timeout)
        if not answer.reached and (others := self.instead_of(hosts)):
            answer = others.ask(worker, script, timeout=timeout)
        return answer

    def ask_all(
        self, script: str, *, timeout: float, workers: Sequence[int] | None = None, given: str | None = None
    ) -> list[Answer]:
        """Answers in worker order."""
        hosts = self.hosts()
        answers = hosts.ask_all(script, timeout=timeout, workers=workers, given=given)
        if not all(answer.reached for answer in answers) and (others := self.instead_of(hosts)):
            answers = others.ask_all(script, timeout=timeout, workers=workers, given=given)
        return answers

    def ask_missed(self, answers: list[Answer], script: str, *, timeout: float, missed: Sequence[int]) -> list[Answer]:
        """The answers, with those of hosts that were missed from a second try."""
        again = {answer.worker: answer for answer in self.hosts().ask_all(script, timeout=timeout, workers=missed)}
        return [again.get(answer.worker, answer) for answer in answers]

    def ask_through_gcloud(self, worker: int, script: str, given: str | None = None) -> Answer:
        """One host by gcloud alone: some seconds a question, for workstations from which our own ssh does not get
        through."""
        try:
            result = shell.run(
                gcloud.ssh_command(self.config, script, worker=str(worker)), timeout=_GCLOUD_SECONDS, input=given
            )
        except CommandTimeout as error:
            return Answer(worker, None, problem=str(error).splitlines()[0])
        if not result.ok:
            return Answer(worker, None, problem=gcloud.essence(result.stderr))
        return Answer(worker, 0, result.stdout, result.stderr)

    def instead_of(self, asked: Hosts) -> Hosts | None:
        """Whom to ask now that hosts did not answer: others, if they were remembered and gcloud says that they are
        elsewhere. It is asked once."""
        with self._lock:
            if self._hosts is not asked:
                return self._hosts  # another thread has found out
            doubted, self._doubtful = self._doubtful, None
        if doubted is None:
            return None
        try:
            fresh = self._where()
        except LaunchError:
            return None
        if fresh == doubted.addresses:
            return None
        addresses.forget(self.config)
        from launcher.tpu_vm.ssh.sessions import Hosts

        with self._lock:
            if self._hosts is not asked:
                return self._hosts
            self._hosts, self._remembered, self._seen = (
                Hosts(fresh),
                None,
                None,
            )  # what is told to hosts depends on what was seen
            others = self._hosts
        asked.close()
        return others

    def _dialled(self) -> None:
        dialling, self._dialling = self._dialling, None
        if dialling is not None:
            with contextlib.suppress(LaunchError):
                dialling.result()

    def _listed(self) -> Hosts:
        from launcher.tpu_vm.ssh.sessions import Hosts

        with self._listing:
            with self._lock:
                if self._hosts is not None:
                    return self._hosts
                known = self._remembered
            listed = known.addresses if known is not None else self._where()
            with self._lock:
                self._hosts, self._doubtful = Hosts(listed), known
                return self._hosts

    def _where(self) -> tuple[addresses.Address, ...]:
        """How gcloud would reach the hosts, kept for later commands when the slice was seen READY."""
        printed = gcloud.call(gcloud.ssh_command(self.config, "true", dry_run=True), timeout=_GCLOUD_SECONDS)
        listed = tuple(addresses.parse_dry_run(printed))
        with self._lock:
            seen = self._seen
        if seen is not None and seen.ready and len(listed) == len(seen.hosts):
            addresses.keep(self.config, Known(seen.created, seen.hosts, listed))
        return listed
