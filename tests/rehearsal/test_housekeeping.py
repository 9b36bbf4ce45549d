"""Claims about looking after slices: doctor, costs, ssh, tunnel (real gcloud, emulated API). Starts three
slices at once; about 45 s."""

import json
import os
import socket
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.emulator import control
from tests.rehearsal.conftest import SLICE
from tests.rehearsal.workstation import Workstation

ONE = SLICE.replace("TYPE", "v4-8")


def gcloud(work: Workstation, *arguments: str) -> str:
    """gcloud as a person beside us would type it."""
    environment = {**os.environ, **control.environment(Path(work.environment["TPU_LAUNCH_HOME"]) / "emulator")}
    argv = ["gcloud", "compute", "tpus", *arguments, "--project=rehearsal-project", "--zone=us-central2-b", "--quiet"]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_slice_above_the_limit_is_not_created(emulator: Workstation) -> None:
    file = emulator.file("dear.yaml", ONE.replace("NAME", "dear"))
    ended = emulator.launch("--emulated", "up", "-f", file, "--max-cost", "12")
    assert ended.code == 2, ended.output
    assert "about $12.88 an hour" in ended.output
    assert gcloud(emulator, "tpu-vm", "list", "--format=value(name)") == ""


@pytest.fixture(scope="module")
def three(emulator: Workstation) -> Workstation:
    """A slice of ours, `old`; one that a colleague's tpu-launch made; one that tpu-launch did not make."""
    emulator.file("old.yaml", ONE.replace("NAME", "old"))
    node = ["--accelerator-type=v4-8", "--version=tpu-ubuntu2204-base"]
    bobs = "--labels=tpu-launch=1,tpu-launch-owner=bob,tpu-launch-expires=1"
    with ThreadPoolExecutor() as pool:
        made = [
            pool.submit(gcloud, emulator, "tpu-vm", "create", "theirs", *node, "--labels=team=other"),
            pool.submit(gcloud, emulator, "tpu-vm", "create", "bobs", *node, bobs),
            pool.submit(emulator.good, "--emulated", "up", "-f", "old.yaml"),
        ]
    for each in made:
        each.result()
    return emulator


def test_doctor_finds_nothing_wrong_with_an_emulated_slice_and_names_a_wrong_zone(emulator: Workstation) -> None:
    file = emulator.file("doctor.yaml", ONE.replace("NAME", "doctor"))
    rows = emulator_json(emulator, "doctor", "-f", file)
    assert {row["verdict"] for row in rows} == {"PASS", "WARN"}, rows
    ended = emulator.launch("--emulated", "doctor", "-f", file, "--set", "zone=europe-west4-a")
    assert ended.code == 2
    assert "fix: zone: one of us-central2-b" in ended.output


def test_ssh_runs_words_as_they_are_and_its_exit_code_is_ours(three: Workstation) -> None:
    ended = three.good("--emulated", "ssh", "-f", "old.yaml", "--", "echo", "a  b", "$HOME", "it's; exit 9")
    assert "a  b $HOME it's; exit 9\n" in ended.output
    ended = three.launch("--emulated", "ssh", "-f", "old.yaml", "--", "sh", "-c", "echo once; exit 255")
    assert (ended.code, ended.output.count("once")) == (254, 1), "gcloud would run it again"
    assert three.launch("--emulated", "ssh", "-f", "old.yaml", "--host", "1", "--", "true").code == 2


def test_a_tunnel_listens_on_loopback_until_ctrl_c(three: Workstation) -> None:
    server = "nohup python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &"
    three.good("--emulated", "ssh", "-f", "old.yaml", "--", "sh", "-c", server)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert (
            three.launch("--emulated", "tunnel", "-f", "old.yaml", "--port", "8123", "--local-port", str(port)).code
            == 2
        )
    running = three.begin("--emulated", "tunnel", "-f", "old.yaml", "--port", "8123", "--local-port", str(port))
    line = running.wait_for(r"http://127\.0\.0\.1:\d+ leads to port 8123 of host 0", 30)
    assert f"127.0.0.1:{port} " in line
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        assert answer.status == 200
    running.interrupt()
    assert running.end(20).code == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 1)


def test_down_and_up_leave_the_slices_of_others_alone(three: Workstation) -> None:
    for name, reason in (("theirs", "tpu-launch did not create it"), ("bobs", "bob created it")):
        file = three.file(f"{name}.yaml", ONE.replace("NAME", name))
        for verb in ("down", "up"):
            ended = three.launch("--emulated", verb, "-f", file)
            assert ended.code == 23, ended.output
            assert reason in ended.output
            assert "--any-owner" in ended.output
    names = gcloud(three, "tpu-vm", "list", "--format=value(name.basename())").split()
    assert sorted(names) == ["bobs", "old", "theirs"]


def emulator_json(work: Workstation, *arguments: str) -> list[dict[str, object]]:
    output = work.good("--emulated", *arguments, "--json").output
    return list(json.loads(output[output.index("[") :]))
