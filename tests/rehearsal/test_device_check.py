"""Claims about `doctor --devices` on emulated slices: a virtual v3-8 (8 devices) and a v4-16 (two CPU hosts). Starts
two slices; about 2 minutes."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.rehearsal.conftest import SLICE
from tests.rehearsal.workstation import Workstation


@pytest.fixture(scope="module")
def one_host(emulator: Workstation) -> Iterator[str]:
    name = emulator.file(
        "one.yaml", SLICE.replace("NAME", "one").replace("TYPE", "v3-8").replace("us-central2-b", "europe-west4-a")
    )
    yield name
    emulator.launch("--emulated", "down", "-f", name)


@pytest.mark.nightly
def test_up_tries_the_eight_devices_of_a_virtual_v3(emulator: Workstation, one_host: str) -> None:
    shown = emulator.good("--emulated", "up", "--check-devices", "-f", one_host).output
    assert "8 of 8 TPU" in shown
    assert shown.count("right") == 2
    assert emulator.containers_of_runs() == []


@pytest.mark.nightly
def test_two_hosts_add_up_over_all_their_devices_and_a_host_that_is_gone_is_told(
    two_hosts: tuple[Workstation, str],
) -> None:
    work, file = two_hosts
    check = ("--emulated", "doctor", "--devices", "--json", "-f", file)
    ended = work.good(*check)
    results = json.loads(ended.output[ended.output.index("[\n") :])
    assert [result["worker"] for result in results] == [0, 1]
    for result in results:
        assert (result["facts"]["devices"], result["facts"]["slice_devices"], result["facts"]["sum"]) == (1, 2, 2.0)
        assert result["facts"]["wrong_products"] == 0
        assert abs(result["facts"]["clock_offset"]) < 5
        assert result["problems"] == []
    assert work.containers_of_runs() == []

    running = work.begin("--emulated", "run", "--new", "-f", file, "--", "sh", "-c", "echo up; exec sleep 60")
    running.wait_for(r"^\[1\] up")
    beside = work.launch(*check)
    assert beside.code == 23, beside.output
    assert len([name for name in work.containers_of_runs() if " Up " in name]) == 2
    work.good("--emulated", "stop", "-f", file, "--grace", "1")
    running.end(60)

    # Devices that don't find those of the other host.
    odd = work.launch(
        "--emulated", "doctor", "--devices", "-f", file, "--set", "run.environment={CPU_NUM_DEVICES: '3'}"
    )
    assert odd.code == 16, odd.output
    assert "host 1: it sees 3 devices in the slice, which should have 6" in odd.output
    assert work.containers_of_runs() == []


@pytest.mark.nightly
def test_a_host_that_does_not_answer_is_named(two_hosts: tuple[Workstation, str]) -> None:
    work, file = two_hosts
    work.good("emulator", "inject", "cut-host", "two", "1")
    ended = work.launch("--emulated", "doctor", "--devices", "-f", file, "--set", "run.start_minutes=0.3")
    work.good("emulator", "inject", "clear")
    assert ended.code in (16, 24), ended.output
    assert re.search(r"host 1: .*", ended.output), ended.output
    assert "Traceback" not in ended.output
