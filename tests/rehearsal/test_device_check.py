"""Claims about `doctor --devices` on an emulated v4-16 (two CPU hosts); about a minute."""

import json

import pytest

from tests.rehearsal.workstation import EmulatedSlice


@pytest.mark.nightly
def test_two_hosts_add_up_over_all_devices_and_a_host_that_is_gone_is_told(two_hosts: EmulatedSlice) -> None:
    check = ("doctor", "--devices", "--json")
    ended = two_hosts.good_on_slice(*check)
    results = json.loads(ended.output[ended.output.index("[\n") :])
    assert [result["worker"] for result in results] == [0, 1]
    for result in results:
        assert (result["facts"]["devices"], result["facts"]["slice_devices"], result["facts"]["sum"]) == (1, 2, 2.0)
        assert result["facts"]["wrong_products"] == 0
        assert abs(result["facts"]["clock_offset"]) < 5
        assert result["problems"] == []
    assert two_hosts.containers_of_runs() == []

    running = two_hosts.begin_run("echo up; exec sleep 60")
    running.wait_for(r"^\[1\] up")
    two_hosts.on_slice(*check).require(23)
    assert len([name for name in two_hosts.containers_of_runs() if " Up " in name]) == 2
    two_hosts.good_on_slice("stop", "--grace", "1")
    running.end(60)

    # Devices that don't find those of the other host.
    three = ("--set", "run.environment={CPU_NUM_DEVICES: '3'}")
    odd = two_hosts.on_slice("doctor", "--devices", *three)
    odd.require(16, "host 1: it sees 3 devices in the slice, which should have 6")
    assert two_hosts.containers_of_runs() == []
