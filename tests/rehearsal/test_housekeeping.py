"""Claims about doctor, ssh and tunnel on a slice (real gcloud, real ssh); about 20 s."""

import json
import socket
import urllib.request

import pytest

from tests.rehearsal.workstation import EmulatedSlice


def test_doctor_finds_nothing_wrong_with_an_emulated_slice_and_names_a_wrong_zone(two_hosts: EmulatedSlice) -> None:
    output = two_hosts.good_on_slice("doctor", "--json").output
    rows = json.loads(output[output.index("[") :])
    assert {row["verdict"] for row in rows} == {"PASS", "WARN"}, rows
    two_hosts.on_slice("doctor", "--set", "zone=europe-west4-a").require(2, "fix: zone: one of us-central2-b")


def test_ssh_runs_words_as_they_are_and_its_exit_code_is_ours(two_hosts: EmulatedSlice) -> None:
    ended = two_hosts.good_on_slice("ssh", "--", "echo", "a  b", "$HOME", "it's; exit 9")
    assert "a  b $HOME it's; exit 9\n" in ended.output
    ended = two_hosts.on_slice("ssh", "--", "sh", "-c", "echo once; exit 255")
    assert (ended.code, ended.output.count("once")) == (254, 1), "gcloud would run it again"
    assert two_hosts.on_slice("ssh", "--host", "2", "--", "true").code == 2


def test_a_tunnel_listens_on_loopback_until_ctrl_c(two_hosts: EmulatedSlice) -> None:
    server = "nohup python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &"
    two_hosts.good_on_slice("ssh", "--", "sh", "-c", server)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tunnel = ("tunnel", "--port", "8123", "--local-port", str(port))
        assert two_hosts.on_slice(*tunnel).code == 2
    running = two_hosts.begin_on_slice(*tunnel)
    assert f"127.0.0.1:{port} " in running.wait_for(r"http://127\.0\.0\.1:\d+ leads to port 8123 of host 0", 30)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        assert answer.status == 200
    running.interrupt()
    assert running.end(20).code == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 1)
