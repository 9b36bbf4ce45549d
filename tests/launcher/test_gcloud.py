"""Claims about gcloud's command lines and about reading its errors. The real gcloud runs in tests/rehearsal."""

import contextlib
import math
import random
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud.calls import Retry, call_gcloud, delete_until_gone, run_gcloud
from launcher.gcloud.errors import Busy, PermissionDenied, ResourceNotFound, Unavailable
from launcher.shell import Result
from launcher.tpu_vm import commands
from launcher.tpu_vm.ssh.addresses import Address, parse_dry_run
from tests.launcher.emulated_gcloud import BUSY, DENIED, UNAVAILABLE, Clock, Cloud
from tests.launcher.run_files import SLICE, load_text


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_text(tmp_path, SLICE.replace("v4-16", "v4-16, capacity: spot"), command=["true"])


@pytest.mark.parametrize(("busy", "raises"), [(3, False), (1000, True)])
def test_another_operation_is_waited_for_a_minute(busy: int, raises: bool) -> None:
    clock, answers = Clock(), iter([1] * busy + [0] * 1000)
    machine = Mock(clock=clock, random=random.Random(1))
    machine.run.side_effect = lambda argv, **_: Result(tuple(argv), next(answers), "done", BUSY)
    begun = clock.now
    with pytest.raises(Busy) if raises else contextlib.nullcontext():
        assert call_gcloud(machine, ["gcloud"], timeout=5) == "done"
    assert (clock.now - begun >= 60) is raises


def test_a_deletion_is_repeated_after_each_look_and_a_new_error_is_told_once() -> None:
    errors, said, clock = iter([UNAVAILABLE, UNAVAILABLE, "ALREADY_EXISTS: request", "", DENIED]), list[str](), Clock()
    looks = iter([("slice s", ["delete"])] * 3 + [("slice s", None), *[("slice s", ["delete"])] * 2])
    machine, begun = Mock(clock=clock), clock.now
    machine.run.side_effect = lambda argv, **_: Result(tuple(argv), int((text := next(errors)) != ""), "", text)
    with pytest.raises(PermissionDenied):
        delete_until_gone(machine, said.append, looks.__next__, clock.now + 60)
    assert [text.split("ed yet: ")[1][:20] for text in said] == ["gcloud: UNAVAILABLE:", "ALREADY_EXISTS: requ"]
    assert clock.now - begun == 4 * 2.0, "no pause after a deletion that succeeds"


def test_the_accelerator_type_zone_and_project_are_always_given(config: Config) -> None:
    words = "accelerator-type=v4-16 zone=us-central2-b project=p version=tpu-ubuntu2204-base spot labels=tpu-launch=1"
    command = commands.create_command(config, {"tpu-launch": "1"})
    assert {f"--{word}" for word in words.split()} <= set(command)


def test_scripts_for_all_hosts_do_without_the_slow_key_exchange_and_what_may_be_secret_keeps_it(config: Config) -> None:
    def key_exchanges(command: list[str]) -> list[str]:
        """What the real client offers with the flags of a command, the first choice first."""
        flags = [word.removeprefix("--ssh-flag=") for word in command if word.startswith("--ssh-flag=")]
        shown = subprocess.run(["ssh", "-F", "none", *flags, "-G", "host"], capture_output=True, text=True, check=True)
        (line,) = (line for line in shown.stdout.splitlines() if line.startswith("kexalgorithms "))
        return line.split(" ")[1].split(",")

    clients_own = key_exchanges([])
    quick = key_exchanges(commands.ssh_command(config, "true"))
    assert quick == [name for name in clients_own if not name.startswith("sntrup761")]
    assert key_exchanges(commands.ssh_command(config, "true", worker="0")) == clients_own
    assert key_exchanges(commands.shell_command(config, 0)) == clients_own


def test_the_dry_run_says_how_to_reach_every_host() -> None:
    line = (
        "/usr/bin/ssh -T -i /home/me/.ssh/google_compute_engine -o CheckHostIP=no -o HashKnownHosts=no "
        "-o HostKeyAlias=tpu.4711-{w}-AbCd/= -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes "
        "-o UserKnownHostsFile=/home/me/.ssh/google_compute_known_hosts me@10.0.0.{w} -- true"
    )
    addresses = parse_dry_run("Using ssh batch size of 1.\n" + line.format(w=0) + "\n" + line.format(w=1) + "\n")
    keys = ("/home/me/.ssh/google_compute_engine", "/home/me/.ssh/google_compute_known_hosts")
    assert addresses == [Address(w, f"10.0.0.{w}", "me", *keys, f"tpu.4711-{w}-AbCd/=") for w in range(2)]


@pytest.mark.parametrize(("retry_denied", "seconds"), [(True, 600), (False, 0)])
def test_a_denied_permission_is_retried_for_ten_minutes_and_told_once(retry_denied: bool, seconds: float) -> None:
    machine, said = Cloud().machine(), list[str]()
    begin = machine.clock.monotonic()
    retry = Retry(machine, said.append, "slice demo", retry_denied=retry_denied)
    with pytest.raises(PermissionDenied):
        retry.call(Mock(side_effect=PermissionDenied("denied")), begin + 3600)
    assert seconds <= machine.clock.monotonic() - begin <= seconds + 90
    assert said == ["slice demo: still waiting, although: denied"] * (seconds > 0)


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        (Result((), 1, "ERROR: (gcloud.x) NOT_FOUND: gone", ""), ResourceNotFound, "gone"),
        (CommandTimeout("no answer"), CommandTimeout, "or the network to it, does not answer"),
    ],
)
def test_a_failed_call_says_what_gcloud_printed_or_that_nothing_answers(
    outcome: Result | CommandTimeout, error: type[LaunchError], words: str
) -> None:
    with pytest.raises(error, match=words):
        run_gcloud(["gcloud"], timeout=5, run=Mock(side_effect=[outcome]))


@pytest.mark.parametrize("other", [Unavailable("503"), None])
def test_a_permission_is_doubted_anew_after_another_answer(other: LaunchError | None) -> None:
    machine = Cloud().machine()
    begin = machine.clock.monotonic()  # ten minutes of denials end a wait, two times eight do not

    def ask() -> str:
        passed = machine.clock.monotonic() - begin
        if 480 <= passed < 600:
            if other is not None:
                raise other
            return "early"
        if passed < 1000:
            raise PermissionDenied("denied")
        return "late"

    said = list[str]()
    retry = Retry(machine, said.append, "slice demo")
    if retry.call(ask, math.inf) == "early":
        machine.clock.sleep(120)
        assert retry.call(ask, math.inf) == "late"
    assert [line.rpartition(" ")[2] for line in said] == ["denied", *(["503"] if other else []), "denied"]


def test_no_try_begins_after_the_deadline() -> None:
    machine, asked = Cloud().machine(), list[float]()
    deadline = machine.clock.monotonic() + 300

    def ask() -> None:
        asked.append(machine.clock.monotonic())
        raise Unavailable("503")

    with pytest.raises(Unavailable):
        Retry(machine, print, "slice demo").call(ask, deadline)
    assert deadline - 60 < asked[-1] <= deadline
