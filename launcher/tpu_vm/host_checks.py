"""Looking at all hosts before a start, in one round trip: what would make the run fail on one of them later, said now,
with what to do.

Pure but for the script, which a host's shell runs. A host prints facts, one a line; `problems` judges them all
together.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CLOCK_SECONDS = 30.0  # hosts that differ more spoil tokens, certificates, and the order of log lines
_DISK_FACTOR = 2.2  # an image is on the disk as layers while its archive is being unpacked


@dataclass(frozen=True)
class Facts:
    """What one host says of itself. `asked` and `answered`: seconds of the workstation's clock around the question."""

    worker: int
    values: Mapping[str, str]
    asked: float
    answered: float


@dataclass(frozen=True)
class Problem:
    """Something wrong with one host (-1: with the slice). A fatal one keeps the run from starting."""

    worker: int
    what: str
    fix: str
    fatal: bool = True
    occupied_by: str = ""  # id of another run that uses the host


def script(image: str, run_id: str, label: str) -> str:
    """Prints `tpu-launch-fact <key> <value>` lines. Changes nothing."""
    held = (
        "find /proc/[0-9]*/fd -maxdepth 1 \\( -lname '/dev/accel[0-9]*' -o -lname '/dev/vfio/[0-9]*' \\) 2>/dev/null | cut -d/ -f3 | sort -un | "
        "while read p; do echo $p:$(tr ' ' '_' < /proc/$p/comm); done | tr '\\n' ' '"
    )
    return "\n".join(
        [
            # unquoted: what has several lines becomes one, without a process
            "set -f; fact() { echo tpu-launch-fact $1 $2; }",
            "docker=docker; [ -w /var/run/docker.sock ] || docker='sudo -n docker'",
            "fact worker \"$(curl -sf --max-time 10 -H 'Metadata-Flavor: Google' "
            'http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number)"',
            'fact time "$(date +%s)"',
            "engine=$($docker info --format '{{.ServerVersion}} {{.DockerRootDir}}' 2>/dev/null); root=${engine#* }",
            'fact engine "${engine%% *}"',
            f"fact image \"$($docker image inspect --format '{{{{.Id}}}}' {shlex.quote(image)} 2>/dev/null)\"",
            f'fact runs "$($docker ps --filter label={label} --format \'{{{{.Label "{label}"}}}}\' 2>/dev/null | grep -vxF {shlex.quote(run_id)})"',
            'fact free_kb "$(set -- $(df -Pk "${root:-/}" 2>/dev/null); [ $# -lt 6 ] || shift $(($# - 6)); echo "${4:-}")"',
            f'fact holders "$(sudo -n sh -c {shlex.quote(held)} 2>/dev/null)"',
            "fact done yes",
        ]
    )


def parse(output: str) -> dict[str, str]:
    """The facts in what a host printed."""
    facts = {}
    for line in output.splitlines():
        match = re.match(r"tpu-launch-fact (\S+) ?(.*)", line)
        if match:
            facts[match.group(1)] = match.group(2).strip()
    return facts


def problems(facts: Sequence[Facts], hosts: int, *, image_bytes: int | None = None) -> list[Problem]:
    """What is wrong, fatal things first. `image_bytes`: size of an image that hosts without it must pull."""
    found: list[Problem] = []
    if len(facts) != hosts:
        found.append(
            Problem(
                -1,
                f"{len(facts)} hosts answered, the slice has {hosts}",
                "`tpu-launch status`, then `tpu-launch down` and `up`",
            )
        )
    for fact in facts:
        found += _of_host(fact, image_bytes)
    return sorted(found, key=lambda problem: (not problem.fatal, problem.worker))


def _of_host(fact: Facts, image_bytes: int | None) -> list[Problem]:
    values, worker = fact.values, fact.worker
    if values.get("done") != "yes":
        return [
            Problem(
                worker, "the host's shell did not answer the checks", "log in and look: gcloud compute tpus tpu-vm ssh"
            )
        ]
    found = []
    if values.get("worker") != str(worker):
        found.append(
            Problem(
                worker,
                f"its metadata server says worker {values.get('worker') or '?'}",
                "the slice is not as its API says: delete and create it again",
            )
        )
    if not values.get("engine"):
        found.append(
            Problem(worker, "its container engine does not answer", "sudo systemctl restart docker, on that host")
        )
    if values.get("runs"):
        other = values["runs"].split()[0]
        fix = "wait for it, or `tpu-launch stop --run RUN`"
        found.append(Problem(worker, f"run {other} is on this host", fix, occupied_by=other))
    if values.get("holders"):
        held = ", ".join(
            f"{name} (process {pid})" for pid, _, name in (entry.partition(":") for entry in values["holders"].split())
        )
        found.append(Problem(worker, f"its TPU is held by {held}", "end it there, for example: sudo kill PROCESS"))
    free = values.get("free_kb", "")
    if (
        image_bytes is not None
        and not values.get("image")
        and free.isdigit()
        and int(free) * 1024 < image_bytes * _DISK_FACTOR
    ):
        gib = int(free) / 2**20
        found.append(
            Problem(
                worker,
                f"{gib:.0f} GiB free, the image needs {image_bytes * _DISK_FACTOR / 2**30:.0f}",
                "docker system prune --all, on that host",
            )
        )
    if values.get("time", "").isdigit():
        skew = max(fact.asked - int(values["time"]) - 1, int(values["time"]) - fact.answered - 1)
        if skew > _CLOCK_SECONDS:
            found.append(
                Problem(
                    worker,
                    f"its clock is {skew:.0f} s off the workstation's",
                    "sudo systemctl restart chrony, on that host",
                    fatal=False,
                )
            )
    return found


def table(found: Sequence[Problem]) -> str:
    """One line a problem, with its fix."""
    return "\n".join(f"  {'slice' if p.worker < 0 else f'host {p.worker}'}: {p.what}\n    fix: {p.fix}" for p in found)
