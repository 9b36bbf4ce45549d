"""`top`: looks at the slice's newest run again and again, and changes nothing.

A look asks the API and every host once, as `status` does, and reads what the run's folder has got since the last one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher import costs
from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.provider import Provider, container_name
from launcher.run import ledger as ledgers
from launcher.run.launch import Context
from launcher.run.ledger import Ledger
from launcher.run.live.frame import View
from launcher.run.logs import read_from
from launcher.run.status import Status, read_status
from launcher.tpu_vm import placement
from training.machine.clock import format_time
from training.telemetry.text import parse_progress

_MEMORY_SECONDS = 10  # for a host to say how much it uses
_MEMINFO = re.compile(r"(MemTotal|MemAvailable): +(\d+) kB")


class Top:
    """The looks of one `tpu-launch top`."""

    def __init__(self, config: Config, context: Context, provider: Provider) -> None:
        self._config, self._context, self._provider = config, context, provider
        self._losses: dict[int, float] = {}
        self._offsets: dict[int, int] = {}  # in host 0's log, by attempt
        self._run = ""

    def look(self) -> View:
        """What is known of the newest run now. Raises LaunchError when the API can't be asked."""
        now = self._context.machine.clock.time()
        status = read_status(self._config, self._context, self._provider)
        created = status.slice.created if status.slice is not None else ""
        lines = status.lines()
        view = View(
            slice=lines[0],
            run=lines[1],
            time=format_time(now),
            cost=costs.since(placement.in_current_zone(self._config), created, now),
        )
        ledger = self._find()
        if status.run is None or ledger is None:
            return view
        self._read_losses(ledger)
        if status.progress is not None:
            self._losses[status.progress.step] = status.progress.loss
        return View(
            slice=view.slice,
            run=view.run,
            time=view.time,
            cost=view.cost,
            progress=status.progress,
            left=_time_left(status),
            losses=dict(self._losses),
            hosts=status.hosts,
            memory=self._read_memory(ledger, [host.worker for host in status.hosts if host.container == "running"]),
            story=status.story,
        )

    def _find(self) -> Ledger | None:
        machine, slice_name = self._context.machine, self._config.slice.name
        try:
            return ledgers.find(
                self._context.home, machine, None, slice_name=slice_name, provider=self._config.provider
            )
        except BadInput:
            return None

    def _read_losses(self, ledger: Ledger) -> None:
        """Adds the losses of the lines that host 0's logs have got; a later attempt's count."""
        if ledger.run_id != self._run:
            self._run, self._losses, self._offsets = ledger.run_id, {}, {}
        for attempt in range(ledger.attempts):
            path = ledger.log_file(attempt, 0)
            while path.exists():
                lines, self._offsets[attempt] = read_from(path, self._offsets.get(attempt, 0))
                if not lines:
                    break
                for line in lines:
                    if progress := parse_progress(line.text):
                        self._losses[progress.step] = progress.loss

    def _read_memory(self, ledger: Ledger, workers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Bytes in use and of the host, of hosts that say so. Not where that takes a gcloud call for each."""
        run, slice_ = self._config.run, self._config.slice
        if not workers or not self._provider.capabilities.cloud_tpu_node or run.transport == "gcloud" or slice_.iap:
            return {}
        found: dict[int, dict[str, int]] = {worker: {} for worker in workers}

        def take(worker: int, line: str) -> None:
            if match := _MEMINFO.match(line):
                found[worker][match[1]] = int(match[2]) * 1024

        container = container_name(ledger.run_id, ledger.attempts - 1)
        try:
            self._provider.execute(container, ["cat", "/proc/meminfo"], workers, seconds=_MEMORY_SECONDS, on_line=take)
        except LaunchError:  # the frame shows that it is not known
            return {}
        return {
            worker: (amounts["MemTotal"] - amounts["MemAvailable"], amounts["MemTotal"])
            for worker, amounts in found.items()
            if len(amounts) == 2
        }


def _time_left(status: Status) -> str:
    """The time that is left, from the newest line of host 0."""
    match = re.search(r"(\S+) left", status.hosts[0].last_line) if status.hosts else None
    return match[1] if match else ""
