"""Parses the output of the scripts on hosts. Pure: text in, dataclasses out.

A script reports on one line a host, `tpu-launch <worker> <word> <detail>`, mixed with the lines of other hosts and of
gcloud. `observe.sh` prints a container's state and log instead, and runs on one host at a time.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from launcher.container_scripts import split_progress
from launcher.log_lines import LogWindow, docker_records, read_log
from launcher.provider import LOG_OVERLAP, ContainerState, HostReport, Observation
from launcher.tpu_vm.host_scripts import LOG_BYTES
from training.machine import parse_time, shift

MOVED = "moved"
"""Begins the detail of a host that has other addresses than the launcher knows."""
FORBIDDEN = "forbidden"
"""Begins the detail of a host whose engine this user may not use."""

_CLOCK_SECONDS = 30.0  # hosts that differ more spoil tokens, certificates, and the order of log lines
_BUSY = "busy"  # a container of another run is running on the host; the detail is that run's id
_FAILED = "failed"


def parse_reports(output: str, word: str, workers: Iterable[int]) -> list[HostReport]:
    """Returns a report of every worker: ok when the host reported `word`, else a failure, also for a silent host."""
    reports = {}
    for line in output.splitlines():
        match = re.match(r"tpu-launch (\d+) (\S+) ?(.*)", line.strip())
        if match:
            worker = int(match[1])
            reports[worker] = _to_report(worker, match[2], match[3], expected=word)
    return [reports.get(worker, HostReport(worker, False, "the host did not answer")) for worker in workers]


def has_reports(output: str) -> bool:
    """Returns whether any host reported anything."""
    return re.search(r"^[ \t]*tpu-launch \d+ \S", output, re.MULTILINE) is not None


def _to_report(worker: int, word: str, detail: str, *, expected: str) -> HostReport:
    """Returns a report, ok if `word` is the expected one. For "busy", `occupied_by` is the id of the other run."""
    if word == expected:
        return HostReport(worker, True, detail)
    if word == _BUSY:
        return HostReport(worker, False, f"run {detail} is on this host", occupied_by=detail)
    return HostReport(worker, False, detail if word == _FAILED else f"{word} {detail}")


def start_warnings(time: int, pages: str, begin: float, end: float) -> Iterator[str]:
    """Yields warnings on what start.sh reports: the host's clock, and the setting of huge pages where it hinders.

    Args:
        time: Unix seconds on the host, between `begin` and `end` (Unix seconds of the workstation).
        pages: The setting; "" where it is right.
    """
    skew = max(begin - time - 1, time - end - 1)
    if skew > _CLOCK_SECONDS:
        yield f"its clock is {skew:.0f} s off the workstation's; sudo systemctl restart chrony, on that host"
    if pages:
        fix = "echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled, on that host"
        yield f"transparent huge pages are off ({pages}) and can't be switched on: starts take longer; {fix}"


def parse_state(line: str) -> ContainerState | None:
    """Returns the state in the first line of `observe.sh`, JSON or "absent" (no container); None if no engine answers.
    `rebooted`: the container was created on an earlier boot of the host. Only an ended container has an exit code."""
    if line == "absent":
        return ContainerState("absent")
    if not line.startswith("{"):
        return None
    summary: Mapping[str, Any] = json.loads(line)
    state: Mapping[str, object] = summary["state"]
    ended = state.get("Status") in ("exited", "dead")
    finished_at = str(state.get("FinishedAt", "")) if ended else ""
    finished = parse_time(finished_at)
    rebooted = summary["created_on"] != summary["boot"]
    return ContainerState(
        status=str(state.get("Status", "")),
        exit_code=int(str(state.get("ExitCode", 0))) if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        started_at=str(state.get("StartedAt", "")),
        finished_at=finished_at,
        error=str(state.get("Error", "")),
        rebooted=rebooted,
        # Of a container that the host took down, the engine writes the end at the next boot; some omit it (the year 1).
        ended_before_reboot=rebooted and finished is not None and 0 < finished < summary["booted"],
    )


def parse_observation(worker: int, output: str) -> tuple[Observation, LogWindow]:
    """Returns the observation in the output of `observe.sh`, and its log; an observation with a `problem` if the engine
    does not answer. Output cut at LOG_BYTES sets `more`. `output` has bytes that are not UTF-8 as surrogates."""
    first, _, rest = output.partition("\n")
    state = parse_state(first.strip())
    progress, rest = split_progress(rest)  # log lines begin with a time
    data = rest.encode(errors="surrogateescape")
    cut = len(data) >= LOG_BYTES
    window = read_log(data, docker_records, complete=state is not None and state.ended and not cut)
    if state is None:
        reason = first.partition("no engine")[2].rstrip()
        return Observation(worker, None, problem=f"its container engine does not answer{reason}"), window
    return Observation(worker, state, window.lines, more=cut, open=window.open, progress=progress), window


def covers(window: LogWindow, since: str, tail: int) -> bool:
    """Returns whether the last records of a log hold every record from `since` on.

    They do when they are fewer than `tail`, and begin at a line that is known already: `since` is LOG_OVERLAP before
    the newest such line, or the oldest that is open. Docker counts records before it leaves out those before `since`.

    Args:
        since: RFC 3339 time, as `Cursor.since` gives it.
        tail: The number of records that was asked for.
    """
    return 0 < window.records < tail and window.first <= shift(since, LOG_OVERLAP)
