"""Claims about `doctor --devices`, without containers: what reports mean; it disturbs no run and leaves nothing."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from launcher.cli.main import cli
from launcher.config import load
from launcher.device_check import COLUMNS, DeviceReport, check_devices, judge_hosts, make_attempt
from launcher.errors import Exit, LaunchError
from launcher.provider import ContainerState, HostReport, LogLine, Observation
from tests.kubernetes.golden import EXAMPLE
from tests.launcher.test_runs import FakeProvider, Workstation, start_and_lose_sight
from training import device_check
from training.device_check import PREFIX, parse_facts
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import TrainError
from training.storage.types import StorageError

GOOD = {
    "clock": 1000.0, "disk_free_bytes": 100 << 30, "bucket_write_mb_s": 50.0, "bucket_read_mb_s": 80.0, "kind": "TPU",
    "devices_expected": 8, "devices": 8, "slice_devices": 32, "memory_bytes": 16 << 30, "wrong_products": 0,
    "sum": 32.0, "phase": "done",
}  # fmt: skip


def host(worker: int, code: int | None = 0, last: str = "", **facts: Any) -> Observation:
    lines = [PREFIX + json.dumps({name: value}) for name, value in {**GOOD, **facts}.items() if value is not None]
    state = ContainerState("running") if code is None else ContainerState("exited", code)
    return Observation(worker, state, tuple(LogLine("", text) for text in [*lines, last]))


def judged(*odd: Observation) -> list[DeviceReport]:
    """The results of a v3-32, of which all hosts but the odd ones are well."""
    by_worker = {observation.worker: observation for observation in odd}
    return judge_hosts([by_worker.get(worker) or host(worker) for worker in range(4)], "v3-32", 300)


def test_hosts_that_are_well_have_a_row_each_and_no_problem() -> None:
    results = judged()
    assert all(result.ok and not result.problems for result in results)
    assert dict(zip(COLUMNS, results[1].row(), strict=True)).items() >= {
        "devices": "8 of 8 TPU", "memory": "16.0 GiB", "bf16 product": "right", "sum over all": "right",
        "clock": "+0.0 s", "disk free": "100 GiB", "bucket w / r": "50 / 80 MB/s",
    }.items()  # fmt: skip
    for damaged in GOOD:
        assert judged(host(2, **{damaged: None}))[2].row()[-1] == "ok"
    assert parse_facts(PREFIX + line for line in ('{"sum": 8}', "5", '[["sum", 1]]', '{"sum": 2')) == {"sum": 8}


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (host(2, devices=6), "6 TPU devices, and it should have 8"),
        (host(2, slice_devices=8, sum=8.0), "it sees 8 devices in the slice, which should have 32"),
        (host(2, wrong_products=3), "3 elements of a matrix product are wrong"),
        (host(2, sum=31.0), "ones of 32 devices add up to 31"),
        (host(2, bucket_error="gs://b: 403"), "output: gs://b: 403"),
        (host(2, 1, phase="opening the devices", error="Couldn't mmap"), "opening the devices: Couldn't mmap"),
        (host(2, None, phase="opening the devices"), "not done after 300 s, in phase 'opening the devices'"),
        (host(2, 134, phase="opening", last="F0 failed"), "opening: ended with exit code 134: F0 failed"),
        (host(2, 127, phase=None, last="no tpu-train"), "tpu-train can't start in this image: no tpu-train"),
        (host(2, 76, phase="opening", lost="host 1"), "not finished, because of another host: host 1"),
        (Observation(2, None, problem="no route to host"), "does not answer: no route to host"),
    ],
)
def test_what_is_wrong_with_a_host_is_told_in_one_line(observation: Observation, message: str) -> None:
    results = judged(observation)
    assert [result.ok for result in results] == [True, True, False, True]
    (finding,) = results[2].problems
    assert (finding.message, "\n" in finding.message) == (message, False)
    assert bool(finding.fix) == ("another host" not in message)
    assert results[2].row()[-1] == "FAIL"


@pytest.mark.parametrize(
    ("user", "capabilities", "as_root"),
    [(1000, "0000000000000000", True), (0, "00000000a80425fb", True), (0, "000001ffffffffff", False)],
)
def test_a_refusal_shows_user_and_device_files_and_advises_root(user: int, capabilities: str, as_root: bool) -> None:
    access = {"user": user, "capabilities": capabilities, "device_files": ["crw-rw---- 0:0 /dev/accel0"]}
    failed = host(0, 1, phase="opening the devices", error="Couldn't mmap", **access)
    finding = judge_hosts([failed], "v3-8", 300)[0].problems[0]
    assert f"(user {user}, effective capabilities {capabilities}; crw-rw---- 0:0 /dev/accel0)" in finding.message
    assert finding.fix.startswith("leave run.user out") == as_root
    assert finding.fix.index("`tpu-launch down`") < finding.fix.index("REQUIREMENTS: requirements-2.8.txt")
    assert "REQUIREMENTS" not in judge_hosts([failed], "v4-8", 300)[0].problems[0].fix


def test_the_check_reads_users_capabilities_and_device_files(tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    for path in (tmp_path / "accel0", tmp_path / "vfio" / "1"):
        path.touch(0o640)
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t00000000a80425fb\n")
    facts = device_check.measure_access(str(tmp_path), str(status))
    assert (facts["user"], facts["capabilities"]) == (os.geteuid(), "00000000a80425fb")
    owner = f"-rw-r----- {os.geteuid()}:{os.getegid()}"
    assert facts["device_files"] == [f"{owner} {tmp_path}/accel0", f"{owner} {tmp_path}/vfio/1"]


def test_a_clock_that_is_off_and_a_full_disk_are_told_and_keep_no_run_from_starting() -> None:
    results = judged(host(1, clock=1042.0), host(3, disk_free_bytes=1 << 30))
    assert all(result.ok for result in results)
    assert results[1].problems[0].message == "its clock is +42 s off the others'"
    assert results[3].problems[0].message == "1.0 GiB of disk are free"


class CheckedHosts(FakeProvider):
    """Two hosts that report what they are told to; host 1 still works when it is first looked at."""

    looks = 0  # at host 1

    def observe(self, worker: int, container: str, since: str | None, **_: object) -> Observation:
        self.looks += worker
        code = None if worker == self.looks == 1 else 0
        return host(worker, code, slice_devices=2, devices=1, devices_expected=1, sum=2.0, kind="CPU")


def checked(work: Workstation, provider: type[FakeProvider] = CheckedHosts) -> list[DeviceReport]:
    context = replace(work.context(), make_provider=lambda config: provider(config, work.hosts))
    return check_devices(work.config(), context, seconds=60)


def test_the_container_runs_once_on_every_host_and_is_removed(work: Workstation) -> None:
    assert [result.ok for result in checked(work)] == [True, True]
    (attempt,) = work.hosts.attempts
    assert (attempt.command[:2], attempt.secrets) == (("tpu-train", "check-devices"), {})
    assert work.hosts.state == {}


def test_it_does_not_start_beside_a_run(work: Workstation) -> None:
    start_and_lose_sight(work)
    with pytest.raises(LaunchError, match="has a run") as refused:
        checked(work)
    assert refused.value.exit_code is Exit.CONFLICT
    assert len(work.hosts.attempts) == 1


def test_the_host_that_refuses_the_container_is_named(work: Workstation) -> None:
    class Refusing(CheckedHosts):
        def start(self, attempt: Any, clock: Any = None) -> list[HostReport]:
            return [super().start(attempt, clock)[0], HostReport(1, False, "no engine")]

    work.hosts.silent.add(1)
    first, second = checked(work, Refusing)
    assert "ssh --host 1 -- sudo docker rm --force tpu-launch-device-check-" in work.messages[-1]
    assert first.ok
    assert second.problems[0].message == "could not start the container: no engine"
    assert work.hosts.state == {}


def test_the_bucket_of_the_file_is_what_is_measured() -> None:
    config = load(EXAMPLE)
    assert make_attempt(config, "device-check-1", "image").command[-2:] == ("--output", config.trainer.output)


@pytest.mark.parametrize(
    ("kind", "slice_", "expected", "error", "told"),
    [
        ("CPU", "v4-8", 3, RuntimeError("Couldn't mmap: not now.\nmore"), r"^RuntimeError: Couldn't mmap: not now\.$"),
        ("TPU", None, 3, AssertionError(), "^AssertionError: no message$"),
        ("TPU", "v4-8", 4, AssertionError("odd"), "^AssertionError: odd$"),
    ],
)
def test_an_error_of_the_driver_is_one_line_after_the_facts_and_the_phase_before_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, slice_: str | None, expected: int, error: Exception, told: str
) -> None:
    facts: dict[str, Any] = {}
    monkeypatch.setattr(device_check, "load", lambda reference: Mock(side_effect=error))
    monkeypatch.setenv("PJRT_DEVICE", kind)
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    with pytest.raises(TrainError, match=told):
        device_check.check_host("torch-xla", None, Cluster(0, ("localhost",), slice_), SingleHost(), facts.__setitem__)
    assert (facts["devices_expected"], facts["phase"]) == (expected, "opening the devices")


def test_the_bucket_is_measured_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {}
    device_check.measure_bucket(f"{tmp_path}/object", facts.__setitem__)
    assert min(facts["bucket_write_mb_s"], facts["bucket_read_mb_s"]) > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(device_check.storage, "read", Mock(side_effect=StorageError("no answer")))
    for place, error in ("/proc/no/such", "/proc/no"), (f"{tmp_path}/object", "no answer"):
        device_check.measure_bucket(place, facts.__setitem__)
        assert error in facts["bucket_error"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_a_row_a_host(work: Workstation, monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> None:
    work.config()
    monkeypatch.setattr("launcher.device_check.check_devices", lambda *_: judged(host(2, devices=6)))
    words = ["doctor", "--devices", "-f", str(work.folder / "run.yaml"), *(["--json"] if as_json else [])]
    ended = CliRunner().invoke(cli, words)
    assert ended.exit_code == Exit.DEVICES == 16
    if as_json:
        assert [result["ok"] for result in json.loads(ended.stdout)] == [True, True, False, True]
        return
    rows = ended.stdout.splitlines()
    assert [row.split()[0] for row in rows[:5]] == ["host", "0", "1", "2", "3"]
    assert rows[5] == "host 2: 6 TPU devices, and it should have 8"
    assert rows[6].strip().startswith("fix: ")
