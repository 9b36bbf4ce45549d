"""A host finds its place and its accelerator, and processes on TPUs get their variables."""

import dataclasses
from pathlib import Path

import pytest

from tests.processes import ROOT
from training import one_host
from training.accelerators import ACCELERATORS, GENERATIONS, Accelerator, Api, GkeNodes, Offer, accelerator, gke_nodes
from training.backends.tensorflow import pod
from training.distributed import cluster as cluster_module
from training.distributed import torch_tpu
from training.distributed.cluster import Cluster, discover, from_environment, tpu_environment
from training.distributed.torch_tpu import rank_environments
from training.errors import BadInput


@pytest.mark.parametrize(
    ("name", "zones"),
    [
        ("v2-8", ("us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c")),
        ("v2-32", ("us-central1-a", "europe-west4-a")),
        ("v3-8", ("us-central1-a", "us-central1-b", "europe-west4-a")),
        ("v3-32", ("europe-west4-a",)),
        ("v4-4096", ("us-central2-b",)),
    ],
)
def test_zones_go_by_size(name: str, zones: tuple[str, ...]) -> None:
    assert accelerator(name).zones() == zones


def test_every_size_is_offered_somewhere_and_gke_offers_those_that_have_nodes() -> None:
    for slice_ in ACCELERATORS.values():
        assert slice_.zones(Api.CLOUD_TPU)
        assert bool(slice_.zones(Api.GKE)) == (slice_.generation.gke is not None)


def test_a_generation_without_the_cloud_tpu_api_is_one_entry() -> None:
    nodes = GkeNodes("tpu7x", "tpu7x-standard-{chips}t")
    offers = (Offer(("us-central1-c",), (Api.GKE, Api.COMPUTE_ENGINE)),)
    v7x = dataclasses.replace(GENERATIONS[-1], name="v7x", prefix="tpu7x", offers=offers, gke=nodes)
    slice_ = Accelerator("tpu7x-16", v7x, (2, 2, 2), 2, 4)
    assert (slice_.zones(Api.CLOUD_TPU), slice_.zones(Api.GKE)) == ((), ("us-central1-c",))
    assert gke_nodes(slice_).machine_type == "tpu7x-standard-4t"


THREE_HOSTS = {"TPU_WORKER_HOSTNAMES": "a,b,c"}
LAUNCHER = {
    "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3", "TPU_ACCELERATOR_TYPE": "v4-16",
    "TPU_LAUNCH_RUN_ID": "r", "TPU_LAUNCH_ATTEMPT": "2",
}  # fmt: skip
JOB = {
    "JOB_COMPLETION_INDEX": "1", "TPU_LAUNCH_HOSTS": "2", "TPU_LAUNCH_HOST_NAME": "demo-w-0-*.demo",
    "TPU_LAUNCH_RUN_ID": "demo",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        (LAUNCHER, Cluster(1, ("10.0.0.2", "10.0.0.3"), "v4-16", "r", 2)),
        ({"JOB_COMPLETION_INDEX": "1", "TPU_WORKER_HOSTNAMES": "a.s, b.s"}, Cluster(1, ("a.s", "b.s"))),
        (JOB, Cluster(1, ("demo-w-0-0.demo", "demo-w-0-1.demo"), None, "demo")),
        ({**JOB, "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}, Cluster(0, ("a", "b"), None, "demo")),
        ({}, Cluster(0, ("localhost",), None, "local", 0)),
    ],
    ids=["launcher", "index of a job", "index and service of a job", "GKE's own before a job's", "one host"],
)
def test_a_host_finds_its_place_from_its_variables(environment: dict[str, str], cluster: Cluster) -> None:
    assert discover(environment) == cluster
    assert cluster.is_first == (cluster.worker == 0)


def test_a_host_with_chips_asks_the_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PJRT_DEVICE, as in a notebook on a TPU VM."""
    known = {"worker-network-endpoints": "10.130.0.5", "agent-worker-number": "0", "accelerator-type": "v4-8"}
    monkeypatch.setattr(cluster_module, "_read_metadata", known.get)
    monkeypatch.setattr(cluster_module.glob, "glob", lambda pattern: ["/dev/vfio/0"] * pattern.startswith("/dev/vfio"))
    assert discover({}) == Cluster(0, ("10.130.0.5",), "v4-8")
    assert discover({"PJRT_DEVICE": "CPU"}) == Cluster(0, ("localhost",))


def test_a_notebook_is_refused_a_tpu_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHER, "PJRT_DEVICE": "TPU"}.items():
        monkeypatch.setenv(name, value)
    config = one_host.configuration(ROOT / "examples" / "mlm.yaml")
    with pytest.raises(BadInput, match="this is host 1 of a slice of 2 hosts"):
        one_host.train(config)


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("worker-0:0:10.130.0.5,worker-1:1:10.130.0.6", ("10.130.0.5", "10.130.0.6")),
        ("10.130.0.5,10.130.0.6", ("10.130.0.5", "10.130.0.6")),
        ("t1v-n-1-w-0,t1v-n-1-w-1", ("t1v-n-1-w-0", "t1v-n-1-w-1")),
        ("unknown:unknown:10.0.0.9", ("10.0.0.9",)),
    ],
)
def test_both_formats_of_the_metadata(text: str, addresses: tuple[str, ...]) -> None:
    last = len(addresses) - 1
    known = {"worker-network-endpoints": text, "agent-worker-number": str(last), "accelerator-type": "v4-16"}
    assert from_environment(cluster_module.metadata_variables(known.get)) == Cluster(last, addresses, "v4-16")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b"}, "worker 2, but only 2 host"),
        ({"TPU_WORKER_ID": "one", "TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is 'one'"),
        ({"JOB_COMPLETION_INDEX": "0", "TPU_LAUNCH_HOST_NAME": "a-*.a"}, "TPU_LAUNCH_HOSTS is ''"),
        ({**LAUNCHER, "TPU_LAUNCH_RENDEZVOUS_PORT": "x"}, "TPU_LAUNCH_RENDEZVOUS_PORT"),
        ({**LAUNCHER, "TPU_LAUNCH_RENDEZVOUS_PORT": "65536"}, "it must be a whole number of at most 65535"),
        ({"TPU_WORKER_ID": "\u00b2", **THREE_HOSTS}, "TPU_WORKER_ID is '\u00b2'; it must be a whole number"),
        ({"TPU_WORKER_ID": "\u0662", **THREE_HOSTS}, "TPU_WORKER_ID is"),
        ({"TPU_WORKER_ID": "9" * 5000, "TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is '9999"),
        ({"JOB_COMPLETION_INDEX": "0", "TPU_LAUNCH_HOST_NAME": "*", "TPU_LAUNCH_HOSTS": "999999999"}, "at most 65536"),
    ],
)
def test_contradictions_are_bad_input(environment: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_environment(environment)


def test_a_tpu_process_never_asks_the_metadata_server() -> None:
    assert tpu_environment(Cluster(3, tuple(f"10.0.0.{number}" for number in range(4)), "v4-32")) == {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-32", "TPU_PROCESS_BOUNDS": "1,1,4",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1", "TPU_WORKER_ID": "3", "CLOUD_TPU_TASK_ID": "3",
        "TPU_WORKER_HOSTNAMES": "10.0.0.0,10.0.0.1,10.0.0.2,10.0.0.3", "TPU_TOPOLOGY_WRAP": "false,false,false",
        "TPU_TOPOLOGY_ALT": "false",
    }  # fmt: skip


def test_a_slice_with_another_number_of_hosts_is_refused() -> None:
    with pytest.raises(BadInput, match="v4-32 has 4 hosts, but this run has 2"):
        tpu_environment(Cluster(0, ("a", "b"), "v4-32"))


def test_tensorflow_leaves_the_chips_to_a_slices_workers_and_refuses_the_wheel_for_cpus() -> None:
    workers = {"TPU_NAME": "grpc://a:8470,grpc://b:8470"}
    assert cluster_module.tensorflow_environment(Cluster(0, ("a",), "v4-16"), workers) == {"TPU_LOAD_LIBRARY": "0"}
    why = r"has TensorFlow for CPUs: build it with `image\.build_args: \{REQUIREMENTS: requirements-tpu\.txt\}`"
    with pytest.raises(BadInput, match=why):
        cluster_module.tensorflow_environment(Cluster(0, ("a",), "v4-8"), {})


@pytest.mark.parametrize("name", ["v3-32", "v4-32"])
def test_a_tensorflow_worker_gets_topology_peers_and_plugin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = {"NEXT_PLUGGABLE_DEVICE_USE_C_API": "true", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/libtpu.so"}
    monkeypatch.setattr(pod, "tensorflow_plugin", lambda: plugin)
    cluster = Cluster(2, tuple(f"10.0.0.{number}" for number in range(4)), name)
    assert pod.worker_environment(cluster) == {**tpu_environment(cluster), **plugin, "TPU_STDERR_LOG_LEVEL": "0"}


def test_a_worker_may_print_other_lines_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (python := tmp_path / "python").write_text("#!/bin/sh\nprintf 'a library is here\\nserving\\n'; exec cat\n")
    python.chmod(0o755)
    monkeypatch.setattr(pod.sys, "executable", str(python))
    with pod.worker({}, 8470, 10.0) as serving:
        assert serving.poll() is None


@pytest.mark.parametrize(
    ("name", "wrap", "resilient"),
    [
        ("v3-32", None, None), ("v3-2048", None, None), ("v4-16", "false,false,false", None),
        ("v4-128", "true,true,true", "true"), ("v4-256", "true,true,true", "true"),
        ("v5p-128", "true,true,true", "true"), ("v5litepod-64", "false,false,false", None),
        ("v5litepod-128", "false,true,false", None), ("v5litepod-256", "true,true,false", None),
        ("v6e-256", "true,true,false", None),
    ],
)  # fmt: skip
def test_links_around_the_ends_are_those_of_googles_plugin(name: str, wrap: str | None, resilient: str | None) -> None:
    """As a v4-256's metadata has them, and as GKE's device plugin computes them for the others."""
    environment = tpu_environment(Cluster(0, ("h",) * ACCELERATORS[name].hosts, name))
    assert environment.get("TPU_TOPOLOGY_WRAP") == wrap
    assert environment.get("ENABLE_ICI_RESILIENCY") == resilient
    assert environment.get("TPU_TOPOLOGY_ALT") == (None if wrap is None else "false")


KNOWN = [slice_ for slice_ in ACCELERATORS.values() if slice_.generation.name in torch_tpu.GENERATIONS]


def test_a_host_of_v4_16() -> None:
    last = rank_environments(Cluster(1, ("10.0.0.2", "10.0.0.3"), "v4-16", "bert", 2))[3]
    addresses = [f"10.0.0.{each}:{port}" for each in (2, 3) for port in (8470, 8471, 8474, 8476)]
    assert last == {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-16", "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3", "TPU_TOPOLOGY_WRAP": "false,false,false",
        "TPU_TOPOLOGY_ALT": "false", "WORLD_SIZE": "8", "RANK": "7", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3",
        "NNODES": "2", "NODE_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "11211",
        "TORCH_TPU_TOPOLOGY": "2,2,2", "TORCH_TPU_DEVICES_PER_HOST": "4",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(addresses),
        "TORCH_TPU_XPROF_SESSION_ID": last["TORCH_TPU_XPROF_SESSION_ID"],
    }  # fmt: skip


@pytest.mark.parametrize("slice_", KNOWN, ids=lambda slice_: slice_.name)
def test_ranks_count_every_chip_once_and_all_processes_agree_on_the_rest(slice_: Accelerator) -> None:
    workers = range(slice_.hosts) if slice_.hosts <= 16 else (0, 1, slice_.hosts - 1)
    hosts = tuple(f"10.{number >> 8}.{number & 255}.2" for number in range(slice_.hosts))
    clusters = (Cluster(worker, hosts, slice_.name) for worker in workers)
    processes = [rank for cluster in clusters for rank in rank_environments(cluster)]
    ranks = [int(process["RANK"]) for process in processes]
    chips = range(slice_.chips_per_host)
    assert ranks == [worker * len(chips) + chip for worker in workers for chip in chips]
    own = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "TPU_WORKER_ID")
    (shared,) = {tuple((key, value) for key, value in process.items() if key not in own) for process in processes}
    addresses = dict(shared)["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert len(set(addresses)) == slice_.chips == int(dict(shared)["WORLD_SIZE"])


def test_several_hosts_meet_on_ports_that_googles_rule_opens() -> None:
    assert {slice_.chips_per_host for slice_ in KNOWN if slice_.hosts > 1} == {4}
    opened = {8470, 8471, 8474, 8476, 11211}  # by Google's automatic firewall rule (jax-ml/jax#35905)
    assert {*torch_tpu.SLICE_BUILDER_PORTS[:4], torch_tpu.MASTER_PORT} == opened
    assert len(set(torch_tpu.SLICE_BUILDER_PORTS)) == max(slice_.chips_per_host for slice_ in KNOWN)


def test_v2_and_v3_are_refused() -> None:
    with pytest.raises(BadInput, match=r"TorchTPU does not know TPU v3 \(v3-8\).*use PyTorch/XLA"):
        rank_environments(Cluster(0, ("10.0.0.2",), "v3-8"))
    assert torch_tpu.find_unsupported(accelerator("v2-32"))
    assert not torch_tpu.find_unsupported(accelerator("v5litepod-8"))


def test_another_version_is_warned_about_in_one_line_and_none_is_refused() -> None:
    assert torch_tpu.find_other_version(torch_tpu.VERSION) == ""
    assert "\n" not in (warning := torch_tpu.find_other_version("0.3.0"))
    assert f"install torch_tpu=={torch_tpu.VERSION}" in warning
    with pytest.raises(BadInput, match=r"needs torch_tpu, which this image lacks"):
        torch_tpu.find_other_version(None)


def test_each_process_counts_as_a_host_of_the_trainer() -> None:
    hosts = ("10.0.0.2", "10.0.0.3")
    processes = [
        torch_tpu.cluster_of_rank(Cluster(worker, hosts, "v4-16"), environment)
        for worker in range(2)
        for environment in rank_environments(Cluster(worker, hosts, "v4-16"))
    ]
    assert [process.worker for process in processes] == list(range(8))
    assert {process.addresses for process in processes} == {("10.0.0.2",) * 4 + ("10.0.0.3",) * 4}
    assert {process.all_addresses for process in processes} == {hosts}
    with pytest.raises(BadInput, match="needs one process a chip of a TPU, which `tpu-train train` starts"):
        torch_tpu.trainer_environment(processes[0], {})
