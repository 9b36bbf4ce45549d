"""What can go wrong around a run, row by row: the verdict, the exit code, the message, and that nothing is left behind.

Elsewhere, in test_runs.py: a command that ends with 255, a launcher that is killed, a host that reboots; in
test_recovery.py: a host that dies, a slice that is PREEMPTED; in test_queued_slices.py: the queue.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.nightly import others_at_night
from tests.processes import wait_until
from tests.rehearsal.conftest import slice_file
from tests.rehearsal.workstation import EmulatedSlice, Workstation, docker, on_this_machine

NAME = "two"
WAITS = "echo here; trap 'exit 75' TERM; while :; do sleep 0.1; done"
SMALL = "image: {dockerfile: small/Dockerfile, repository: us-central2-docker.pkg.dev/rehearsal-project/images/small}\n"


@pytest.fixture
def pair(two_hosts: EmulatedSlice) -> Iterator[EmulatedSlice]:
    """The slice, and an image of little more than a shell in the registry; no container of a run is left on a host."""
    (two_hosts.folder / "small").mkdir(exist_ok=True)
    two_hosts.file("small/Dockerfile", "FROM debian:bookworm-slim\nLABEL tpu-launch.test=faults\n")
    yield replace(two_hosts, run_file=two_hosts.file("small.yaml", slice_file(NAME, "v4-16") + SMALL))
    two_hosts.good("emulator", "inject", "clear")
    assert two_hosts.containers_of_runs() == []


def hosts(work: Workstation, name: str = NAME) -> list[str]:
    """The names of a slice's host containers."""
    nodes = work.good("emulator", "status", "--json").json()["nodes"]
    return [host["hostname"] for node in nodes if node["name"].endswith(f"/{name}") for host in node["hosts"]]


def on_host(work: Workstation, worker: int, script: str) -> str:
    """Runs a script on a host from beside, as root."""
    return docker("exec", hosts(work)[worker], "sh", "-c", script)


def bashrc(work: Workstation, worker: int, lines: str) -> None:
    """What every ssh session of that host does first."""
    on_host(work, worker, f"for home in /root $(ls -d /home/*/); do cat > $home/.bashrc <<'EOF'\n{lines}\nEOF\ndone")


@dataclass(frozen=True)
class Row:
    """A fault, and what a command must make of it."""

    name: str
    inject: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    settings: tuple[str, ...] = ()


def test_a_start_that_gcloud_runs_again_starts_once(pair: EmulatedSlice) -> None:
    """The connection breaks when the container has been started: ssh ends with 255, and gcloud runs all of it again."""
    lines = (
        'case "$BASH_EXECUTION_STRING" in *"docker start"*) mkdir /tmp/dropped 2>/dev/null && trap '
        '"kill -9 $PPID" EXIT ;; esac'
    )
    bashrc(pair, 1, lines)
    ended = pair.begin_run("echo ran; sleep 3").end(120)
    bashrc(pair, 1, "")
    assert "dropped" in on_host(pair, 1, "ls /tmp"), "the fault did not happen"
    assert [ended.require(0).output.count(f"[{worker}] ran") for worker in (0, 1)] == [1, 1]


PULL = ("host 1: the image can not be pulled", "503 Service Unavailable")
START_ROWS = (
    Row("registry down", ("registry",), 24, ("503 Service Unavailable",)),
    Row("image missing on one host", ("registry", NAME, "1"), 24, PULL),
    Row("disk full", ("disk-full", NAME, "0"), 24, ("host 0: ", "no space left on device")),
)


@pytest.mark.parametrize("row", START_ROWS, ids=lambda row: row.name)
def test_what_keeps_a_run_from_starting_is_told_with_its_host(pair: EmulatedSlice, row: Row) -> None:
    pair.good("emulator", "inject", *row.inject)
    begun = time.monotonic()
    ended = pair.begin_run(WAITS).end(90)
    assert "[0] here" not in ended.require(row.code, *row.says).output
    assert time.monotonic() - begun < 80


def test_a_repository_that_is_not_there_is_named_and_made_on_request(pair: EmulatedSlice) -> None:
    pair.file("small/Dockerfile", "FROM debian:bookworm-slim\nLABEL tpu-launch.test=repository\n")
    pair.good("emulator", "inject", "repository")
    advice = ("gcloud artifacts repositories create images", "image.create_repository: true")
    pair.begin_run(WAITS).end(60).require(2, "does not exist", *advice)
    wanted = ("--set", "image.create_repository=true")
    pair.begin_run("echo ran", *wanted).end(60).require(0, "created the repository", "[1] ran")


def one(work: Workstation, name: str) -> str:
    """The file of a slice of one host."""
    return work.file(f"{name}.yaml", slice_file(name, "v4-8") + SMALL)


BRIEFLY = ("--set", "slice.create_minutes=0.15")
UP_ROWS = (
    Row("stock-out", ("stockout",), 20, ("no more capacity", "try again later, another zone")),
    Row("quota, 429", ("quota", "--count", "1"), 21, ("Quota limit", "waiting does not help")),
    Row("permission, 403", ("permission", "--count", "1"), 22, ("Permission denied", "the account lacks a permission")),
    Row("an operation that never ends", ("stuck",), 24, ("no end after", "tpu-launch down"), BRIEFLY),
)


@pytest.mark.parametrize("row", others_at_night(UP_ROWS, UP_ROWS[:1]), ids=lambda row: row.name)
def test_what_google_refuses_is_told_apart_and_down_leaves_nothing(pair: EmulatedSlice, row: Row) -> None:
    file = one(pair, "single")
    pair.good("emulator", "inject", *row.inject)
    pair.launch("--emulated", "up", "-f", file, *row.settings).require(row.code, *row.says)
    pair.good("--emulated", "down", "-f", file)
    assert hosts(pair, "single") == []


@pytest.mark.nightly
def test_conflicts_with_other_changes_pass_and_one_with_another_slice_is_told(pair: EmulatedSlice) -> None:
    """409 for the creation, while the ssh key is spread (gcloud swallows it and tries for 50 s), for the deletion."""
    file = one(pair, "single")
    pair.good("emulator", "inject", "busy", "--count", "1")
    running = pair.begin("--emulated", "up", "-f", file)
    wait_until(lambda: hosts(pair, "single"), 60, lambda: "\n".join(running.lines))
    pair.good("emulator", "inject", "busy", "--count", "1")
    assert running.end(300).require(0, "is READY: 1 hosts", "waiting for the hosts").seconds < on_this_machine(45)
    other = pair.launch("--emulated", "up", "-f", file, "--set", "slice.accelerator_type=v4-16")
    other.require(23, "exists and is a v4-8, not a v4-16")
    pair.good("emulator", "inject", "busy", "--count", "1")
    pair.good("--emulated", "down", "-f", file)
    assert hosts(pair, "single") == []


def test_a_changed_host_key_is_told_and_not_trusted(pair: EmulatedSlice) -> None:
    keep = "mkdir -p /root/kept && cp -p /etc/ssh/ssh_host_* /root/kept/"
    make = "f=/etc/ssh/ssh_host_${kind}_key; rm $f; ssh-keygen -q -t $kind -N '' -f $f"
    is_back = "until ssh-keyscan 127.0.0.1 2>/dev/null | grep -q ed25519; do sleep 0.1; done"
    on_host(pair, 1, f"{keep}; for kind in ed25519 ecdsa; do {make}; done; pkill -HUP -o sshd; {is_back}")
    try:
        ended = pair.begin_run(WAITS).end(300)  # at once but for a busy machine; gcloud alone tries for 47 s
        ended.require(24, "host 1: ", "the host key of worker 1", "has changed")
    finally:
        on_host(pair, 1, f"cp -p /root/kept/* /etc/ssh/; pkill -HUP -o sshd; {is_back}")
    # gcloud itself connects to such a host; what it starts there waits for secrets, and the next start removes it.
    pair.begin_run("echo well").end(60).require(0, "[0] well", "[1] well")
