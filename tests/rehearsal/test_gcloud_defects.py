"""A defect of gcloud 528 that needs the API at a certain moment, provoked with the real gcloud and the emulator's API in this process. About 5 s.

Where the others are provoked and survived:

| defect                                              | test                                                                                                 |
|-----------------------------------------------------|------------------------------------------------------------------------------------------------------|
| --output-directory, exit codes of worker subsets    | test_emulator_slice.py: test_defects_of_gcloud_...; never used: test_gcloud.py: test_ssh_goes_to_... |
| 255 runs the command again                          | test_fault_matrix.py: test_a_start_that_gcloud_runs_again_starts_once                                |
| it waits for all workers, rc by worker index        | test_runs.py: test_the_first_host_that_fails_ends_the_run_and_is_named                               |
| output without prefix, stdin to one worker only     | test_secrets.py: ...[gcloud]; test_runs.py: test_gcloud_alone_is_enough_as_transport                 |
| ssh crashes while guest attributes are empty        | here                                                                                                 |
| scp wants the key in the agent                      | scp is not used                                                                                      |
| each ssh may change the node's metadata: 409        | test_fault_matrix.py: test_conflicts_with_other_changes_pass_...                                     |
| --reserved without --zone; --spot in alpha; v2-8    | test_gcloud.py and test_queued.py: the zone and the type always, the GA track                        |
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import shell
from launcher.config import Config, load
from launcher.emulator import tpu_api
from launcher.emulator.catalogue import CODES, ApiError
from launcher.emulator.lifecycle import end_changes
from launcher.emulator.state import Host, State
from launcher.emulator.web import Acceptor, Request, Response, json_response, serve_http
from launcher.tpu_vm import gcloud
from launcher.tpu_vm.addresses import parse_dry_run
from launcher.tpu_vm.tpu_vm import TpuVm

NODE = ("projects", "p", "locations", "us-central2-b", "nodes")
BODY = {"acceleratorType": "v4-16", "runtimeVersion": "tpu-ubuntu2204-base", "networkConfig": {"enableExternalIps": True}}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    """A READY slice of two hosts that nobody can reach, behind the emulated API."""
    found = State("0badcafe", 0, "", "", 0, 0, subnet="10.200.0.0/22")
    tpu_api.answer(found, tpu_api.Call("POST", NODE, "", {"nodeId": "demo"}, dict(BODY)), time.time())
    end_changes(found)
    (node,) = found.nodes.values()
    node.resource |= {"state": "READY", "health": "HEALTHY"}
    lock = threading.Lock()

    def answer(request: Request) -> Response:
        with lock:
            if request.segments[0] == "compute":
                return json_response(tpu_api.compute_project("p"))
            if request.path.endswith(":getGuestAttributes") and not any(host.guest_attributes for host in hosts_of(found)):
                return json_response({"guestAttributes": []})
            try:
                call = tpu_api.parse(request.method, request.segments[1:], request.query, request.json())
                return json_response(tpu_api.answer(found, call, time.time()))
            except ApiError as error:
                return json_response(error.as_json(), CODES[error.code][0])
            finally:
                end_changes(found)

    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    acceptor = Acceptor()
    acceptor.start()
    acceptor.add(listener, lambda connection: serve_http(connection, answer))
    endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    for key, value in {
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": endpoint,
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{endpoint}compute/v1/",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(key, value)
    for name in [key for key in os.environ if key.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield found
    acceptor.remove(listener, close=True)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text("project: p\nzone: us-central2-b\nslice: {name: demo, accelerator_type: v4-16}\n")
    return load(path, command=["true"])


def hosts_of(state: State) -> list[Host]:
    (node,) = state.nodes.values()
    return node.hosts


def test_a_host_whose_guest_agent_is_not_up_yet_is_a_problem_that_passes(state: State, config: Config) -> None:
    """gcloud itself crashes on one worker of a slice without guest attributes; for the launcher that host does not answer yet."""
    crashed = shell.run(gcloud.ssh_command(config, "true", worker="0"), timeout=60)
    assert not crashed.ok
    assert "IndexError" in crashed.stderr
    answer = TpuVm(config, print)._ask_through_gcloud(0, "true")
    assert (answer.reached, "IndexError" in answer.problem) == (False, True)
    for host in hosts_of(state):
        host.guest_attributes["hostkeys/ssh-ed25519"] = "AAAAC3NzaC1lZDI1NTE5AAAAIGAbCdEf"
    addresses = parse_dry_run(gcloud.call(gcloud.ssh_command(config, "true", dry_run=True), timeout=60))
    assert [address.alias.rsplit("-", 2)[1:] for address in addresses] == [["0", "AbCdEf"], ["1", "AbCdEf"]]
