"""Checks of all hosts before a start, in one round trip: what would make the run fail on one of them later is reported
now, with what to do about it.

`check_host.sh` prints facts, one a line; `find_problems` judges those of all hosts together. Nothing is changed on a
host. Pure: the caller runs the script and passes its output on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.tpu_vm.host_scripts import LABEL_RUN, huge_pages_file
from launcher.tpu_vm.scripts import load, render

_CLOCK_SECONDS = 30.0  # hosts that differ more spoil tokens, certificates, and the order of log lines
_DISK_FACTOR = 2.2  # an image is on the disk as layers while its archive is being unpacked


@dataclass(frozen=True)
class HostFacts:
    """What one host printed."""

    worker: int
    values: Mapping[str, str]

    begin: float
    """Seconds of the workstation's clock before the check."""

    end: float
    """Seconds of the workstation's clock after it."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with one host."""

    worker: int
    """The host; -1 for the slice."""

    message: str

    fix: str
    """What a person can do about it."""

    fatal: bool = True
    """Whether it keeps the run from starting."""

    occupied_by: str = ""
    """Id of another run that uses the host, when that is the problem."""


def check_script(image: str, run_id: str, accelerator_type: str) -> str:
    """The script that prints a host's facts."""
    holders, pages = load("list_tpu_holders"), huge_pages_file(accelerator_type)
    parameters = {"image": image, "run_id": run_id, "label_run": LABEL_RUN}
    return render("check_host", **parameters, list_holders=holders, huge_pages=pages)


def parse_facts(output: str) -> dict[str, str]:
    """The facts in the output of a host."""
    facts = {}
    for line in output.splitlines():
        match = re.match(r"tpu-launch-fact (\S+) ?(.*)", line)
        if match:
            facts[match[1]] = match[2].strip()
    return facts


def find_problems(hosts: Sequence[HostFacts], host_count: int, *, image_bytes: int | None = None) -> list[Problem]:
    """The problems of all hosts, fatal ones first.

    Args:
        hosts: the facts of the hosts that answered.
        host_count: how many the slice has.
        image_bytes: unpacked size of an image that hosts without it must pull; None when unknown or not needed.
    """
    problems: list[Problem] = []
    if len(hosts) != host_count:
        message = f"{len(hosts)} hosts answered, the slice has {host_count}"
        problems.append(Problem(-1, message, "`tpu-launch status`, then `tpu-launch down` and `up`"))
    for facts in hosts:
        if facts.values.get("done") == "yes":
            problems += [*_identity(facts), *_occupation(facts), *_disk(facts, image_bytes), *_clock(facts)]
            problems += _huge_pages(facts)
        else:
            message = "the host's shell did not answer the checks"
            problems.append(Problem(facts.worker, message, "log in and look: gcloud compute tpus tpu-vm ssh"))
    return sorted(problems, key=lambda problem: (not problem.fatal, problem.worker))


def _identity(facts: HostFacts) -> Iterator[Problem]:
    """The host is the one that the API says, and its engine runs."""
    worker = facts.values.get("worker")
    if worker != str(facts.worker):
        fix = "the slice is not as its API says: delete and create it again"
        yield Problem(facts.worker, f"its metadata server says worker {worker or '?'}", fix)
    if not facts.values.get("engine"):
        fix = "sudo systemctl restart docker, on that host"
        yield Problem(facts.worker, "its container engine does not answer", fix)


def _occupation(facts: HostFacts) -> Iterator[Problem]:
    """Neither another run nor another process uses the host's TPU."""
    if runs := facts.values.get("runs", "").split():
        fix = "wait for it, or `tpu-launch stop --run RUN`"
        yield Problem(facts.worker, f"run {runs[0]} is on this host", fix, occupied_by=runs[0])
    if holders := facts.values.get("holders", "").split():
        processes = (holder.partition(":") for holder in holders)
        names = ", ".join(f"{name} (process {process})" for process, _, name in processes)
        yield Problem(facts.worker, f"its TPU is held by {names}", "end it there, for example: sudo kill PROCESS")


def _disk(facts: HostFacts, image_bytes: int | None) -> Iterator[Problem]:
    """The image fits on the disk, unless the host has it already."""
    free_kb = facts.values.get("free_kb", "")
    if image_bytes is None or facts.values.get("image") or not free_kb.isdigit():
        return
    needed = image_bytes * _DISK_FACTOR
    if int(free_kb) * 1024 < needed:
        message = f"{int(free_kb) / 2**20:.0f} GiB free, the image needs {needed / 2**30:.0f}"
        yield Problem(facts.worker, message, "docker system prune --all, on that host")


def _clock(facts: HostFacts) -> Iterator[Problem]:
    """The host's clock agrees with the workstation's."""
    time = facts.values.get("time", "")
    if not time.isdigit():
        return
    skew = max(facts.begin - int(time) - 1, int(time) - facts.end - 1)
    if skew > _CLOCK_SECONDS:
        fix = "sudo systemctl restart chrony, on that host"
        yield Problem(facts.worker, f"its clock is {skew:.0f} s off the workstation's", fix, fatal=False)


def _huge_pages(facts: HostFacts) -> Iterator[Problem]:
    """Transparent huge pages are on, or `prepare` can switch them on."""
    if pages := facts.values.get("huge_pages_kept"):
        message = f"transparent huge pages are off ({pages}) and can't be switched on: starts take longer"
        fix = "echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled, on that host"
        yield Problem(facts.worker, message, fix, fatal=False)


def format_table(problems: Sequence[Problem]) -> str:
    """Two lines a problem: what it is, and its fix."""
    return "\n".join(
        f"  {'slice' if problem.worker < 0 else f'host {problem.worker}'}: {problem.message}\n    fix: {problem.fix}"
        for problem in problems
    )
