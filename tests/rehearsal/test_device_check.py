"""Claims about `doctor --devices` on an emulated v4-16 (two CPU hosts); about a minute."""

import json

import pytest

from tests.rehearsal.workstation import Workstation


@pytest.mark.nightly
def test_two_hosts_add_up_over_all_devices_and_a_host_that_is_gone_is_told(two_hosts: tuple[Workstation, str]) -> None:
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
    three = ("--set", "run.environment={CPU_NUM_DEVICES: '3'}")
    odd = work.launch("--emulated", "doctor", "--devices", "-f", file, *three)
    assert odd.code == 16, odd.output
    assert "host 1: it sees 3 devices in the slice, which should have 6" in odd.output
    assert work.containers_of_runs() == []
