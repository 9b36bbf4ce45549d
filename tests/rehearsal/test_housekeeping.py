"""Claims about doctor, ssh and tunnel on a slice (real gcloud, real ssh); about 20 s."""

import json
import socket
import urllib.request

import pytest

from tests.rehearsal.workstation import Workstation

TwoHosts = tuple[Workstation, str]


def test_doctor_finds_nothing_wrong_with_an_emulated_slice_and_names_a_wrong_zone(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    output = work.good("--emulated", "doctor", "-f", file, "--json").output
    rows = json.loads(output[output.index("[") :])
    assert {row["verdict"] for row in rows} == {"PASS", "WARN"}, rows
    ended = work.launch("--emulated", "doctor", "-f", file, "--set", "zone=europe-west4-a")
    assert ended.code == 2
    assert "fix: zone: one of us-central2-b" in ended.output


def test_ssh_runs_words_as_they_are_and_its_exit_code_is_ours(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    ended = work.good("--emulated", "ssh", "-f", file, "--", "echo", "a  b", "$HOME", "it's; exit 9")
    assert "a  b $HOME it's; exit 9\n" in ended.output
    ended = work.launch("--emulated", "ssh", "-f", file, "--", "sh", "-c", "echo once; exit 255")
    assert (ended.code, ended.output.count("once")) == (254, 1), "gcloud would run it again"
    assert work.launch("--emulated", "ssh", "-f", file, "--host", "2", "--", "true").code == 2


def test_a_tunnel_listens_on_loopback_until_ctrl_c(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    server = "nohup python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &"
    work.good("--emulated", "ssh", "-f", file, "--", "sh", "-c", server)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tunnel = ("--emulated", "tunnel", "-f", file, "--port", "8123", "--local-port", str(port))
        assert work.launch(*tunnel).code == 2
    running = work.begin(*tunnel)
    line = running.wait_for(r"http://127\.0\.0\.1:\d+ leads to port 8123 of host 0", 30)
    assert f"127.0.0.1:{port} " in line
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        assert answer.status == 200
    running.interrupt()
    assert running.end(20).code == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 1)
