"""Checks of all hosts before a start, in one round trip: reports what would make the run fail on a host later.

`check_host.sh` prints facts, one a line, and changes nothing; `judge_hosts` turns those of all hosts into findings.
Pure: the caller runs the script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.findings import Finding, Severity, failure, warning
from launcher.tpu_vm.host_scripts import LABEL_RUN, huge_pages_file
from launcher.tpu_vm.scripts import load, render

_CLOCK_SECONDS = 30.0  # hosts that differ more spoil tokens, certificates, and the order of log lines
_DISK_FACTOR = 2.2  # an image is on the disk as layers while its archive is being unpacked


@dataclass(frozen=True)
class HostFacts:
    """The facts printed by one host."""

    worker: int
    values: Mapping[str, str]

    begin: float
    """Seconds of the workstation's clock before the check."""

    end: float
    """Seconds of the workstation's clock after it."""

    @property
    def where(self) -> str:
        return f"host {self.worker}"


def check_script(image: str, run_id: str, accelerator_type: str) -> str:
    """Returns the script that prints a host's facts: its image, runs, TPU holders, disk, clock and huge pages."""
    holders, pages = load("list_tpu_holders"), huge_pages_file(accelerator_type)
    parameters = {"image": image, "run_id": run_id, "label_run": LABEL_RUN}
    return render("check_host", **parameters, list_holders=holders, huge_pages=pages)


def parse_facts(output: str) -> dict[str, str]:
    """Returns the facts in the output of a host, by name; ignores other lines."""
    facts = {}
    for line in output.splitlines():
        match = re.match(r"tpu-launch-fact (\S+) ?(.*)", line)
        if match:
            facts[match[1]] = match[2].strip()
    return facts


def judge_hosts(hosts: Sequence[HostFacts], host_count: int, *, image_bytes: int | None = None) -> list[Finding]:
    """Returns what is wrong with the hosts, fatal findings first.

    Args:
        hosts: Facts of the hosts that answered.
        image_bytes: Unpacked size of an image that hosts without it must pull; None when unknown or not needed.
    """
    findings: list[Finding] = []
    if len(hosts) != host_count:
        message = f"{len(hosts)} hosts answered, the slice has {host_count}"
        findings.append(failure("slice", message, "`tpu-launch status`, then `tpu-launch down` and `up`"))
    for facts in hosts:
        if facts.values.get("done") == "yes":
            findings += [*_worker_and_engine(facts), *_occupation(facts), *_disk(facts, image_bytes), *_clock(facts)]
            findings += _huge_pages(facts)
        else:
            message = "the host's shell did not run the checks"
            findings.append(failure(facts.where, message, "log in and look: gcloud compute tpus tpu-vm ssh"))
    return sorted(findings, key=lambda finding: not finding.fatal)


def _worker_and_engine(facts: HostFacts) -> Iterator[Finding]:
    """Yields a failure if the host is another worker than its address says, or its container engine does not answer."""
    worker = facts.values.get("worker")
    if worker != str(facts.worker):
        fix = "the slice is not as its API says: delete and create it again"
        yield failure(facts.where, f"its metadata server says worker {worker or '?'}", fix)
    if not facts.values.get("engine"):
        fix = "sudo systemctl restart docker, on that host"
        yield failure(facts.where, "its container engine does not answer", fix)


def _occupation(facts: HostFacts) -> Iterator[Finding]:
    """Yields a failure for another run on the host, and one for processes that hold its TPU."""
    if runs := facts.values.get("runs", "").split():
        fix = "wait for it, or `tpu-launch stop --run RUN`"
        yield Finding(facts.where, Severity.FAIL, f"run {runs[0]} is on this host", fix, occupied_by=runs[0])
    if holders := facts.values.get("holders", "").split():
        processes = (holder.partition(":") for holder in holders)
        names = ", ".join(f"{name} (process {process})" for process, _, name in processes)
        yield failure(facts.where, f"its TPU is held by {names}", "end it there, for example: sudo kill PROCESS")


def _disk(facts: HostFacts, image_bytes: int | None) -> Iterator[Finding]:
    """Yields a failure if the host lacks the image and the disk space to pull it; nothing when either is unknown."""
    free_kb = facts.values.get("free_kb", "")
    if image_bytes is None or facts.values.get("image") or not free_kb.isdigit():
        return
    needed = image_bytes * _DISK_FACTOR
    if int(free_kb) * 1024 < needed:
        message = f"{int(free_kb) / 2**20:.0f} GiB free, the image needs {needed / 2**30:.0f}"
        yield failure(facts.where, message, "docker system prune --all, on that host")


def _clock(facts: HostFacts) -> Iterator[Finding]:
    """Yields a warning if the host's clock is more than 30 s off the workstation's."""
    time = facts.values.get("time", "")
    if not time.isdigit():
        return
    skew = max(facts.begin - int(time) - 1, int(time) - facts.end - 1)
    if skew > _CLOCK_SECONDS:
        fix = "sudo systemctl restart chrony, on that host"
        yield warning(facts.where, f"its clock is {skew:.0f} s off the workstation's", fix)


def _huge_pages(facts: HostFacts) -> Iterator[Finding]:
    """Yields a warning if transparent huge pages are off and `prepare` can't switch them on."""
    if pages := facts.values.get("huge_pages_kept"):
        message = f"transparent huge pages are off ({pages}) and can't be switched on: starts take longer"
        fix = "echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled, on that host"
        yield warning(facts.where, message, fix)
