"""The variables of TorchTPU's processes; tests/torch_tpu compares them with what the package itself computes."""

import pytest

from training.accelerators import ACCELERATORS, Accelerator, accelerator
from training.distributed import torch_tpu
from training.distributed.cluster import Cluster
from training.distributed.torch_tpu import rank_environments
from training.errors import BadInput

KNOWN = [slice_ for slice_ in ACCELERATORS.values() if slice_.generation.name in torch_tpu.GENERATIONS]
OPEN_PORTS = {8470, 8471, 8474, 8476, 11211}  # of Google's automatic firewall rule (jax-ml/jax#35905)


def host(slice_: Accelerator, worker: int) -> list[dict[str, str]]:
    addresses = tuple(f"10.{number >> 8}.{number & 255}.2" for number in range(slice_.hosts))
    return rank_environments(Cluster(worker, addresses, slice_.name))


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
    processes = [rank for worker in workers for rank in host(slice_, worker)]
    ranks = [int(process["RANK"]) for process in processes]
    chips = range(slice_.chips_per_host)
    assert ranks == [worker * len(chips) + chip for worker in workers for chip in chips]
    own = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "TPU_WORKER_ID")
    (shared,) = {tuple((key, value) for key, value in process.items() if key not in own) for process in processes}
    addresses = dict(shared)["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert len(set(addresses)) == slice_.chips == int(dict(shared)["WORLD_SIZE"])


def test_several_hosts_meet_on_ports_that_googles_rule_opens() -> None:
    assert {slice_.chips_per_host for slice_ in KNOWN if slice_.hosts > 1} == {4}
    assert {*torch_tpu.SLICE_BUILDER_PORTS[:4], torch_tpu.MASTER_PORT} == OPEN_PORTS
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
