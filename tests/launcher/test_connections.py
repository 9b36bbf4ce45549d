"""Claims about where a slice's hosts are, and when gcloud is asked. Sockets are real, gcloud is its printed words."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import paramiko
import pytest

from launcher.config import Config
from launcher.errors import CommandTimeout, HostsUnreachable, LaunchError
from launcher.gcloud import Conflict, PermissionDenied, Preempted
from launcher.provider import Attempt, HostReport, Overlay, SliceState
from launcher.providers import this_machine
from launcher.shell import Result
from launcher.tpu_vm import ssh
from launcher.tpu_vm.connections import (
    Address,
    ConnectionPool,
    HostResult,
    KnownSlice,
    SliceConnections,
    forget_addresses,
    load_addresses,
    save_addresses,
)
from launcher.tpu_vm.provider import TpuVm
from launcher.workstation import ConnectionFailed
from tests.launcher.emulated_gcloud import DENIED, OURS, UNAVAILABLE, Clock, Cloud
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.script_host import write_program
from tests.processes import ROOT

HOST = Address(0, "h", "me", "key", "known", "h")
RESET = ConnectionFailed("reset by peer")
DRY_RUN = (  # as gcloud 528 prints it
    "/usr/bin/ssh -T -i key -o CheckHostIP=no -o HashKnownHosts=no -o HostKeyAlias=tpu.1-{worker} "
    "-o IdentitiesOnly=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile=known me@{host} -- true\n"
)


def gcloud_says(folder: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[str]) -> Path:
    """A gcloud that prints the way to these hosts, or that there is no such slice, and notes that it was asked."""
    asked = folder / "asked"
    asked.write_text("")
    told = (DRY_RUN.format(worker=worker, host=host) for worker, host in enumerate(hosts))
    (folder / "told").write_text("".join(told))
    end = f"cat {folder}/told" if hosts else "echo 'ERROR: (gcloud) NOT_FOUND: no slice demo' >&2; exit 1"
    write_program(folder / "bin", "gcloud", f"echo asked >>{asked}\n{end}")
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")
    return asked


def config(folder: Path, kind: str = "v4-16", more: str = "") -> Config:
    return load_text(folder, SLICE.replace("v4-16", kind + more), command=["true"])


PULL = """
import os, time
from dataclasses import replace
from unittest.mock import Mock
from launcher.workstation import Address
from launcher.providers import this_machine
from launcher.tpu_vm.connections import ConnectionPool

def pull(command, *, timeout, stdin):
    os.write(1, b"pulling\\n")  # one write: three threads do it
    time.sleep(600)

machine = replace(this_machine(), connect=lambda address: Mock(run=pull))
pool = ConnectionPool([Address(worker, "h", "me", "key", "known", "h") for worker in range(3)], machine)
try:
    pool.run_all("pull", [*pool.addresses], timeout=900)
finally:
    pool.close()
"""


@pytest.mark.parametrize(("idle", "error", "tries"), [(60.0, RESET, 2), (1.0, RESET, 1), (60.0, TimeoutError, 1)])
def test_only_an_idle_connection_is_retried(idle: float, error: Exception | type[Exception], tries: int) -> None:
    clock, host = Clock(), Mock()
    host.run.side_effect = [(0, "", ""), error, (0, "", "")]
    pool = ConnectionPool([HOST], replace(this_machine(), clock=clock, connect=lambda address: host))
    assert pool.run(0, "true", timeout=5).reached
    clock.sleep(idle)
    assert pool.run(0, "true", timeout=5).reached == (tries == 2)
    assert host.run.call_count == 1 + tries
    pool.close()
    assert [call[0] for call in host.method_calls] == ["run", "run", "close", *["run"] * (tries - 1), "close"]


@pytest.mark.parametrize(
    ("state", "error"), [("DELETING", Conflict), ("PREEMPTED", Preempted), ("READY", HostsUnreachable)]
)
def test_hosts_are_waited_for_while_their_slice_is_there(tmp_path: Path, state: str, error: type[LaunchError]) -> None:
    cloud, begun, said = Cloud(), Clock().now, list[str]()
    cloud.trouble = lambda zone, command, now: UNAVAILABLE if command == "tpu-vm ssh" else None
    cloud.at(150.0, lambda: cloud.node().resource.update(state=state))
    with pytest.raises(error):
        TpuVm(config(tmp_path), said.append, cloud.machine()).create()
    assert len([line for line in said if line.startswith("waiting for the hosts")]) == 1
    assert 150 <= cloud.clock.now - begun < (600 if state == "READY" else 250)
    assert cloud.calls.count("us-central2-b tpu-vm ssh") < 90, "not without a pause"


def test_a_host_key_is_the_one_that_gcloud_keeps_under_the_alias() -> None:
    key, other = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()
    kept = paramiko.HostKeys()
    policy = ssh._AliasKeys(Address(0, "10.0.0.1", "me", "key", "known", "TPU.1-0"), lambda file: kept)
    kept.add("10.0.0.1", key.get_name(), key)
    with pytest.raises(ssh.HostKeyUnknown):
        policy.missing_host_key(paramiko.SSHClient(), "10.0.0.1", key)
    kept.add("tpu.1-0", key.get_name(), key)
    policy.missing_host_key(paramiko.SSHClient(), "10.0.0.1", key)
    with pytest.raises(paramiko.SSHException, match=r"-f known -R tpu\.1-0"):
        policy.missing_host_key(paramiko.SSHClient(), "10.0.0.1", other)


def test_host_keys_are_read_again_when_their_file_has_changed(tmp_path: Path) -> None:
    client, file = ssh.SshClient(), tmp_path / "known"
    assert not client._known_hosts(str(file))
    for seconds, names in (1, ["tpu.1-0"]), (2, ["tpu.1-0", "tpu.1-1"]):
        key = paramiko.ECDSAKey.generate()
        file.write_text("".join(f"{name} {key.get_name()} {key.get_base64()}\n" for name in names))
        os.utime(file, (seconds, seconds))
        assert sorted(client._known_hosts(str(file))) == names


@pytest.mark.parametrize("line", [b"tpu.1-0 ssh-ed25519 AAAAC", b"\xff"])
def test_a_damaged_file_of_host_keys_is_left_to_gcloud(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "known").write_bytes(line)
    with pytest.raises(ConnectionFailed, match="known: remove the damaged line") as failed, ssh._translate_failures():
        ssh.SshClient()._known_hosts(str(tmp_path / "known"))
    assert failed.value.refused


def test_a_host_is_tried_once_and_not_if_the_slice_has_it_no_more() -> None:
    """The slice's name belongs to a smaller one by now, while a thread stops an attempt of the last one."""
    connect = Mock(side_effect=ConnectionFailed("Connection refused"))
    pool = ConnectionPool([HOST], replace(this_machine(), connect=connect))
    assert not pool.run(0, "true", timeout=5).reached
    assert "no host 1" in pool.run(1, "true", timeout=5).problem
    assert connect.call_count == 1
    assert not pool.follow(0, "true", timeout=5, on_line=print).refused, "gcloud would not reach it either"


def test_a_late_look_opens_no_connection_of_closed_ones() -> None:
    """A look at a host that is lost goes on while a recovery closes the connections of the last attempt."""
    host = Mock()
    pool = ConnectionPool([HOST], replace(this_machine(), connect=lambda address: host))
    host.run.side_effect = lambda *_, **__: pool.close() or (0, "", "")
    assert pool.run(0, "true", timeout=5).reached
    assert "were closed" in pool.run(0, "true", timeout=5).problem
    assert [call[0] for call in host.method_calls] == ["run", "close"]


def test_ctrl_c_does_not_wait_for_hosts_that_pull() -> None:
    with subprocess.Popen(
        ["env", "--default-signal=INT", f"PYTHONPATH={ROOT}", sys.executable, "-c", PULL],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout.readline() == b"pulling\n"
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        finally:
            process.kill()


def test_a_slice_is_remembered_for_the_same_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_addresses(config(tmp_path)) is None
    known = remembered(tmp_path)
    assert load_addresses(config(tmp_path)) == known
    assert load_addresses(config(tmp_path, "v4-32")) is None
    assert load_addresses(config(tmp_path, more=", internal_ips: true")) is None
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", "http://127.0.0.1:1/")
    assert load_addresses(config(tmp_path)) is None, "an emulated slice is another one"
    monkeypatch.delenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU")
    (kept,) = (tmp_path / "home" / "slices").iterdir()
    kept.write_text(kept.read_text()[:40])
    assert load_addresses(config(tmp_path)) is None, "cut short"
    forget_addresses(config(tmp_path))
    assert not list((tmp_path / "home" / "slices").iterdir())


def remembered(folder: Path) -> KnownSlice:
    """Two hosts where nothing listens, kept by an earlier command."""
    two = (Address(worker, f"127.9.9.{worker + 1}", "me", "key", "known", f"tpu.1-{worker}") for worker in range(2))
    known = KnownSlice("2026-01-01T00:00:00Z", ("10.1.0.0", "10.1.0.1"), tuple(two))
    save_addresses(config(folder), known)
    return known


def seen(known: KnownSlice) -> SliceState:
    return SliceState("demo", "READY", "HEALTHY", "v4-16", known.internal, created=known.created)


@pytest.mark.parametrize("change", [{"created": "2026-02-02T00:00:00Z"}, {"hosts": ("10.1.0.0", "10.1.0.9")}])
def test_what_is_remembered_holds_until_the_slice_is_seen_to_be_another(tmp_path: Path, change: dict[str, Any]) -> None:
    known = remembered(tmp_path)
    connections = SliceConnections(config(tmp_path), this_machine())
    connections.note_state(seen(known))
    assert connections.has_known_slice
    assert connections.pool() is connections.pool()
    connections = SliceConnections(config(tmp_path), this_machine())  # of the next command
    connections.note_state(replace(seen(known), **change))
    assert not connections.has_known_slice
    assert load_addresses(config(tmp_path)) is None


def test_a_long_command_finds_the_hosts_of_a_replaced_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `top` does while a run is recovered; one answer without the slice may be old."""
    first = seen(remembered(tmp_path))
    forget_addresses(config(tmp_path))
    gcloud_says(tmp_path, monkeypatch, ["127.9.8.1", "127.9.8.2"])
    connections = SliceConnections(config(tmp_path), this_machine())
    connections.note_state(first)
    pool = connections.pool()
    for state, is_same in (first, True), (None, True), (replace(first, created="2026-02-02T00:00:00Z"), False):
        connections.note_state(state)
        assert (connections.pool() is pool) == is_same
    forget_addresses(config(tmp_path))
    connections.note_state(replace(first, state="CREATING"))
    connections.pool()
    assert load_addresses(config(tmp_path)) is None, "not until it is READY"


@pytest.mark.parametrize("moved", [False, True])
def test_gcloud_is_asked_once_for_silent_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, moved: bool) -> None:
    known = remembered(tmp_path)
    asked = gcloud_says(tmp_path, monkeypatch, [f"127.9.{8 if moved else 9}.{worker + 1}" for worker in range(2)])
    connections = SliceConnections(config(tmp_path), this_machine())
    connections.note_state(seen(known))
    before = connections.pool()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: connections.run_all("true", [number % 2], timeout=5)[0], range(16)))
    assert not any(answer.reached for answer in answers)
    assert asked.read_text() == "asked\n"
    assert (connections.pool() is not before) == moved
    assert connections.identity()[1] == (() if moved else known.internal)
    assert (load_addresses(config(tmp_path)) == known) == (not moved)


def test_gcloud_is_asked_in_moderation_while_it_finds_no_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, clock = gcloud_says(tmp_path, monkeypatch, []), Clock()
    connections = SliceConnections(config(tmp_path), replace(this_machine(), clock=clock))
    counts = []
    for pause in (0.0, 0.0, 4.0, 2.0):
        clock.sleep(pause)
        with pytest.raises(LaunchError, match="no slice demo"):
            connections.pool()
        counts.append(len(asked.read_text().splitlines()))
    connections.note_state(None)  # what the API tells may have changed
    with pytest.raises(LaunchError, match="no slice demo"):
        connections.pool()
    assert [count - counts[0] for count in (*counts, len(asked.read_text().splitlines()))] == [0, 0, 0, 1, 2]


def test_commands_begin_where_hosts_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: Address) -> Mock:
        if address.host.startswith("127.9.9."):
            raise ConnectionFailed("no answer")
        return Mock(run=Mock(return_value=(0, "", "")))

    known, machine = remembered(tmp_path), replace(this_machine(), connect=connect)
    gcloud_says(tmp_path, monkeypatch, ["127.9.8.1", "127.9.8.2"])
    assert SliceConnections(config(tmp_path), machine).open_pool().connect_all()
    save_addresses(config(tmp_path), known)
    connections = SliceConnections(config(tmp_path), machine)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: connections.run_all("true", [number % 2], timeout=5)[0].reached, range(16)))
    save_addresses(config(tmp_path), known)
    evidence = TpuVm(config(tmp_path), print, machine).evidence("container", [0, 1])
    assert [evidence[f"host-{worker}.txt"] for worker in range(2)] == ["", ""]


def test_a_connection_that_opens_for_a_replaced_pool_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed, begun, replaced = list[str](), list[str](), threading.Event(), threading.Event()

    def connect(address: Address) -> Mock:
        if address.host == "127.9.9.1":
            assert begun.wait(10)
            raise ConnectionFailed("no answer")
        if address.host == "127.9.9.2":
            begun.set()
            assert replaced.wait(10)
        opened.append(address.host)
        return Mock(run=Mock(return_value=(0, "", "")), close=partial(closed.append, address.host))

    remembered(tmp_path)
    gcloud_says(tmp_path, monkeypatch, ["127.9.8.1", "127.9.8.2"])
    connections = SliceConnections(config(tmp_path), replace(this_machine(), connect=connect))
    connections.connect_in_background()
    assert connections.run_all("true", [0], timeout=5)[0].reached, "although host 1 has not answered yet"
    replaced.set()
    connections.close()
    assert sorted(closed) == sorted(opened) == ["127.9.8.1", "127.9.9.2"]


class _Gcloud:
    """A gcloud whose hosts answer each script's word, and for a start what `started` says, one call after another."""

    def __init__(self, *started: str) -> None:
        self.started = list(started)
        self.calls: list[tuple[str, float]] = []  # a start's or a script's text, and its time-out
        self.address, self.exit_code = 0, 0  # the code of a script's call

    def run(self, argv: Sequence[str], *, timeout: float, **options: object) -> Result:
        script, words = argv[-1], set(argv)
        if "describe" in words:
            self.address += 1
            hosts = [{"ipAddress": f"10.0.{self.address}.{worker}"} for worker in range(2)]
            return Result(tuple(argv), 0, json.dumps({"name": "demo", "state": "READY", "networkEndpoints": hosts}), "")
        self.calls.append((script, timeout))
        if "--worker=all" in words:
            return Result(tuple(argv), 0, self.started.pop(0), "")
        word = next(word for word in ("copied", "delivered", "stopped") if f"report {word}" in script)
        worker = next(word.partition("=")[2] for word in argv if word.startswith("--worker="))
        return Result(tuple(argv), self.exit_code, f"tpu-launch {worker} {word}\n", "Using ssh batch size of 1.")

    def provider(self, folder: Path, more: str = ", iap: true", say: Callable[[str], None] = print) -> TpuVm:
        return TpuVm(config(folder, more=more), say, replace(this_machine(), run=self.run))


def started(*details: str) -> str:
    return "".join(f"tpu-launch {worker} {detail}\n" for worker, detail in enumerate(details))


ATTEMPT = Attempt("demo-1", 0, "sha256:ab", ("true",), {}, overlay=Overlay("/app", b"x" * 1000))


def test_what_goes_through_gcloud_has_the_time_that_it_needs(tmp_path: Path) -> None:
    """A stop waits for its grace, and an overlay for the network: over IAP too."""
    gcloud = _Gcloud(started("started id 0", "started id 0"))
    provider = gcloud.provider(tmp_path)
    provider.stop("container", grace=600, remove=False)
    assert [seconds >= 600 + 30 for _, seconds in gcloud.calls] == [True, True], "one call a host"
    assert [report.detail for report in provider.start(ATTEMPT)] == ["id", "id"]
    wanted = config(tmp_path).run.start_minutes * 60
    assert [seconds >= wanted for script, seconds in gcloud.calls if "report copied" in script] == [True, True]
    gcloud.exit_code = 1  # gcloud's message does not say why a script failed; the host's report does
    assert [report.detail for report in provider.stop("container", grace=5, remove=False)] == ["", ""]
    assert [*provider.evidence("container", [0, 1])] == ["slice.json"]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (started("started id 0", "started other 0"), "the hosts do not have the same image: host 0 has id; host 1 has"),
        (started("started id 0", "failed its TPU is held"), "its TPU is held"),
        (started("started id 0", "busy other-1"), "run other-1 is on this host"),
        (started("started id 0"), "the host did not answer"),
    ],
)
def test_no_command_begins_unless_all_hosts_started_the_same_image(tmp_path: Path, answer: str, problem: str) -> None:
    """The commands wait for their secrets, which no host gets."""
    gcloud = _Gcloud(answer)
    try:
        told = "; ".join(report.detail for report in gcloud.provider(tmp_path).start(ATTEMPT) if not report.ok)
    except LaunchError as error:
        told = str(error)
    assert problem in told
    assert len(gcloud.calls) == 1


def test_hosts_that_have_other_addresses_than_were_kept_are_started_with_their_own(tmp_path: Path) -> None:
    """Another machine recreated the slice: containers would look for each other in vain."""
    remembered(tmp_path)
    gcloud = _Gcloud(started("moved to 10.0.1.0", "moved to 10.0.1.1"), started("failed for a test", "failed too"))
    assert [report.detail for report in gcloud.provider(tmp_path, "").start(ATTEMPT)] == ["for a test", "too"]
    (before, _), (after, _) = gcloud.calls
    assert "0=10.1.0.0 1=10.1.0.1" in before
    assert "0=10.0.1.0 1=10.0.1.1" in after
    assert "TPU_WORKER_HOSTNAMES=10.0.1.0,10.0.1.1" in after
    assert gcloud.address == 1, "described once"
    assert load_addresses(config(tmp_path)) is None


def test_a_start_tells_of_wrong_clocks_and_huge_pages_and_goes_on(tmp_path: Path) -> None:
    now, said = int(time.time()), list[str]()
    gcloud = _Gcloud(started(f"started id {now - 50}", f"started id {now + 1} always [never]"))
    assert all(report.ok for report in gcloud.provider(tmp_path, say=said.append).start(ATTEMPT))
    slow, pages = said
    assert re.match("host 0: its clock is (48|49|50) s off", slow)
    assert "host 1: transparent huge pages are off (always [never])" in pages


class _KeySpreads(Cloud):
    """A cloud in which one contact takes as many seconds as the key needs to spread; a shorter call never succeeds."""

    key_seconds = 40.0
    contact = "tpu-launch 0 up\ntpu-launch 1 up\n"

    def run(self, argv: Sequence[str], *, timeout: float, **options: object) -> Result:
        if "ssh" not in argv:
            return super().run(argv, timeout=timeout, **options)
        self.clock.sleep(min(timeout, self.key_seconds))
        if timeout < self.key_seconds:
            raise CommandTimeout(f"no answer within {timeout:.0f} s from: gcloud ssh")
        return Result(tuple(argv), 0, self.contact, "")


def test_first_contact_succeeds_however_long_a_key_takes_to_spread(tmp_path: Path) -> None:
    cloud = _KeySpreads()
    stale = iter([None, None, "ERROR: (gcloud.x) NOT_FOUND: Resource 'n' was not found"])  # the third description
    cloud.trouble = lambda zone, command, now: next(stale, None) if command == "tpu-vm describe" else None
    TpuVm(config(tmp_path, more=", iap: true"), lambda text: None, cloud.machine()).create()


def test_a_user_without_sudo_is_not_kept_waiting_on_a_slice_that_is_billed(tmp_path: Path) -> None:
    cloud = _KeySpreads()
    cloud.contact = "tpu-launch 0 up\ntpu-launch 1 forbidden sudo: a password is required \n"
    with pytest.raises(PermissionDenied, match=r"(?s)host 1: .*\(sudo: a password is required\).*osAdminLogin.*billed"):
        TpuVm(config(tmp_path, more=", iap: true"), lambda text: None, cloud.machine()).create()


def test_down_tells_that_there_is_no_slice_after_two_looks(tmp_path: Path) -> None:
    cloud, said = Cloud(), list[str]()
    remembered(tmp_path)
    TpuVm(config(tmp_path), said.append, cloud.machine()).delete()
    assert said == ["there is no slice demo"]
    assert cloud.calls.count("us-central2-b tpu-vm describe") == 2
    assert cloud.clock.slept.count(5.0) == 1, "an answer may be stale for seconds"
    assert load_addresses(config(tmp_path)) is None
    cloud.made_by(OURS)
    TpuVm(config(tmp_path), said.append, cloud.machine()).delete()
    assert not [line for line in said[1:] if "there is no slice" in line]
    remembered(tmp_path)
    cloud.trouble = lambda zone, command, now: DENIED if command == "tpu-vm create" else None
    with pytest.raises(PermissionDenied):
        TpuVm(config(tmp_path), print, cloud.machine()).create()
    assert load_addresses(config(tmp_path)) is None


def test_evidence_of_a_failed_attempt_never_raises_while_gcloud_fails(tmp_path: Path) -> None:
    run = Mock(return_value=Result((), 1, "", "ERROR: (gcloud) the network is unreachable"))
    files = TpuVm(config(tmp_path), print, replace(this_machine(), run=run)).evidence("container", [0, 1])
    assert sorted(files) == ["hosts.txt", "slice.json"]
    assert all("network" in text for text in files.values())


def answer_all(monkeypatch: pytest.MonkeyPatch, slice_: TpuVm, run_all: Callable[..., list[HostResult]]) -> None:
    monkeypatch.setattr(slice_._connections, "pool", lambda: SimpleNamespace(run_all=run_all))
    monkeypatch.setattr(slice_._connections, "replacement_of", lambda pool: None)


def test_a_host_that_missed_the_secrets_gets_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt of several hosts has one: a connection that breaks once must not keep it from starting."""
    delivered = [HostResult(worker, 0, f"tpu-launch {worker} delivered\n") for worker in range(2)]
    broken = [delivered[0], HostResult(1, None, problem="connection reset")]
    run_all = Mock(side_effect=[[*broken], delivered[1:], broken])
    slice_ = TpuVm(config(tmp_path), print, this_machine())
    answer_all(monkeypatch, slice_, run_all)
    reports = [HostReport(worker, True, "id") for worker in range(2)]
    monkeypatch.setattr(slice_, "_start_containers", lambda attempt: reports)
    attempt = Attempt("demo-1", 0, "sha256:ab", ("true",), {})
    assert [report.ok for report in slice_.start(attempt)] == [True, True]
    sent = run_all.call_args_list
    assert all(f"TPU_LAUNCH_SECRET={attempt.host_secret}" in call.kwargs["stdin"] for call in sent)
    assert slice_.stacks("container")[1] == "connection reset"
    assert [[*call.args[1]] for call in sent] == [[0, 1], [1], [0, 1]], "stacks once: they may be of another moment"


def test_a_host_that_refuses_ssh_is_stopped_through_gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcloud = _Gcloud()
    slice_ = gcloud.provider(tmp_path, "")
    answers = [HostResult(0, None, problem="No.", refused=True), HostResult(1, 0, "tpu-launch 1 stopped\n")]
    answer_all(monkeypatch, slice_, lambda *_, **__: answers)
    assert [report.ok for report in slice_.stop("container", grace=5, remove=False)] == [True, True]
    assert len(gcloud.calls) == 1, "host 0 is not tried again over ssh, and host 1 not stopped again"


def test_commands_to_all_hosts_share_a_client_with_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first commands of a process go to all hosts at once."""

    class SlowToMake(ssh.SshClient):
        _read_key = Mock(side_effect=lambda path: time.sleep(0.05))

        def __init__(self) -> None:
            time.sleep(0.2)  # as the import of its module
            super().__init__()

    monkeypatch.setattr(ssh, "SshClient", SlowToMake)
    monkeypatch.setattr(ssh.socket, "create_connection", Mock())
    monkeypatch.setattr(ssh, "FabricConnection", Mock())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(this_machine().connect, [replace(HOST, worker=worker) for worker in range(8)]))
    SlowToMake._read_key.assert_called_once_with("key")


@pytest.mark.parametrize(
    "options", [("rsa", "-b", "2048"), ("rsa", "-b", "2048", "-m", "PEM"), ("ed25519",), ("ecdsa",)]
)
def test_every_kind_of_key_that_gcloud_uses_is_read(tmp_path: Path, options: tuple[str, ...]) -> None:
    key = make_key(tmp_path, *options)
    public = key.with_suffix(".pub").read_text().split()
    read = ssh.SshClient().key(str(key))
    assert [read.get_name(), read.get_base64()] == public[:2]
    key.with_name("key-cert.pub").touch()
    with pytest.raises(paramiko.AuthenticationException):  # its certificate counts too
        ssh.SshClient().key(str(key))


class Channel:
    """A channel on which a host sends pieces of output, each so many seconds after the last one."""

    exit_status = 0

    def __init__(self, *pieces: tuple[float, bytes]) -> None:
        self.pieces, self.now, self.timeout, self.calls = [*pieces], 1000.0, 0.0, list[tuple[object, ...]]()
        self.status_event = threading.Event()
        self.status_event.set()

    def __getattr__(self, name: str) -> Callable[..., bytes]:
        return lambda *given: self.calls.append((name, *given)) or b""

    def connection(self) -> ssh.SshConnection:
        way = SimpleNamespace(open_session=lambda **_: self)
        return ssh.SshConnection(SimpleNamespace(client=SimpleNamespace(get_transport=lambda: way)))

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def recv(self, _size: int) -> bytes:
        seconds, piece = self.pieces.pop(0)
        self.now += min(seconds, self.timeout)
        if seconds > self.timeout:
            raise TimeoutError
        return piece


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(("timeout", "ends"), [(10.0, True), (5.0, False)])
def test_a_command_may_be_silent(monkeypatch: pytest.MonkeyPatch, timeout: float, ends: bool, follows: bool) -> None:
    channel, lines = Channel((3.0, b"a\nb"), (3.0, b"c\r\nd"), (0.0, b"")), list[str]()
    connection = channel.connection()
    monkeypatch.setattr(ssh.time, "monotonic", lambda: channel.now)
    with contextlib.nullcontext() if ends else pytest.raises(TimeoutError):
        if follows:
            assert connection.follow("train", timeout=timeout, on_line=lines.append) == 0
        else:
            assert connection.run("train", timeout=timeout, stdin="in\udcff") == (0, "a\nbc\r\nd", "")
    begin, given = ("exec_command", "train"), [("sendall", b"in\xff"), ("shutdown_write",)]
    assert channel.calls[:3] == ([("set_combine_stderr", True), begin, ("close",)] if follows else [begin, *given])
    assert lines == (["a", "bc", "d"] if ends else ["a"]) * follows


def test_output_without_a_pause_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel(*[(0.005, b"a\n")] * 1000)
    monkeypatch.setattr(ssh.time, "monotonic", lambda: channel.now)
    with pytest.raises(TimeoutError):
        channel.connection().follow("yes", timeout=2, on_line=lambda _: None)
    assert channel.now < 1004
    with pytest.raises(BrokenPipeError):  # of `| head`: the host is not out of reach
        channel.connection().follow("yes", timeout=2, on_line=Mock(side_effect=BrokenPipeError))


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("status", [None, -1], ids=["not told by the deadline", "the connection closes"])
def test_a_command_without_status_goes_on(monkeypatch: pytest.MonkeyPatch, status: int | None, follows: bool) -> None:
    channel = Channel((6.0 if status is None else 0.0, b"a\n"), (0.0, b""), (0.0, b""))
    if status is None:
        channel.status_event.clear()
    channel.exit_status = status or 0
    monkeypatch.setattr(ssh.time, "monotonic", lambda: channel.now)
    connection = channel.connection()
    run = partial(connection.follow, on_line=print) if follows else partial(connection.run, stdin=None)
    error, words = (ConnectionFailed, "closed before the command ended") if status else (TimeoutError, None)
    with pytest.raises(error, match=words):
        run("train", timeout=6.0)


@pytest.mark.parametrize(
    ("error", "told"), [(None, ""), (EOFError, "EOFError"), (TimeoutError, "no answer within 5 s")]
)
def test_a_connection_checks_host_keys_and_misses_a_lost_host(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None, told: str
) -> None:
    link, made, opens = Mock(), Mock(), error is None
    made.open.side_effect = error
    monkeypatch.setattr(ssh.socket, "create_connection", lambda *_, **__: link)
    monkeypatch.setattr(ssh, "FabricConnection", lambda **_: made)
    monkeypatch.setattr(ssh.SshClient, "key", lambda *_: None)
    with contextlib.nullcontext() if opens else pytest.raises(ConnectionFailed, match=told):
        ssh.SshClient().connect(HOST)
    (policy,) = made.client.set_missing_host_key_policy.call_args.args
    assert isinstance(policy, ssh._AliasKeys)
    assert made.open.call_count == 1
    assert link.close.call_count == (not opens)
    way = made.client.get_transport.return_value
    assert [call.args for call in way.set_keepalive.call_args_list] == [(5,)] * opens
    assert [call.args for call in way.sock.settimeout.call_args_list] == [(2.0,)] * opens
    assert way.sock.setsockopt.call_count == (opens and sys.platform == "linux")


def test_a_connection_is_shut_down_before_it_is_closed() -> None:
    made = Mock(is_connected=True)
    assert ssh.SshConnection(made).is_open
    ssh.SshConnection(made).close()
    assert [call[0] for call in made.mock_calls] == [
        "client.get_transport", "client.get_transport().sock.shutdown", "close",
    ]  # fmt: skip
    made.client.get_transport.return_value = None
    with pytest.raises(ConnectionFailed, match="another thread closed"):  # since the pool has found it open
        ssh.SshConnection(made).run("true", timeout=1.0, stdin=None)


REFUSALS = [paramiko.AuthenticationException("no banner"), ssh.HostKeyUnknown("no banner")]


@pytest.mark.parametrize("error", [EOFError(), paramiko.SSHException("no banner"), *REFUSALS])
def test_an_error_is_told_by_its_words_or_else_by_its_name(error: Exception) -> None:
    with pytest.raises(ConnectionFailed, match=r"^(EOFError|no banner)$") as failed, ssh._translate_failures():
        raise error
    assert failed.value.refused == (error in REFUSALS)


def make_key(folder: Path, kind: str, *options: str, passphrase: str = "") -> Path:
    path = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *options, "-N", passphrase, "-f", path], check=True)
    return path
