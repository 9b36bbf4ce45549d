"""Our variables beside what torch_tpu computes from those of GKE, for every accelerator type that it knows."""

import importlib.metadata
import json
import os
import re
from pathlib import Path

import pytest
import yaml
from torch_tpu import _loader
from torch_tpu._internal.distributed import distributed
from torch_tpu._internal.utils import hardware

from tests.kubernetes.cluster.controllers import _injected
from training.accelerators import ACCELERATORS, Accelerator
from training.distributed.cluster import Cluster, discover
from training.distributed.torch_tpu import GENERATIONS, VERSION, rank_environments

KNOWN = [slice_ for slice_ in ACCELERATORS.values() if slice_.generation.name in GENERATIONS]
GOLDEN = Path(__file__).parents[1] / "kubernetes" / "golden"
ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
SAME = ("NNODES", "NODE_RANK", "MASTER_ADDR", "TORCH_TPU_TOPOLOGY")
COMPUTED = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCH_TPU_TOPOLOGY", ADDRESSES)


def ask_helper(environment: dict[str, str]) -> dict[str, str]:
    """Returns the variables after the helper has run in a process that has only these; it reads each of them once."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for name in [name for name in os.environ if re.match("TPU_|TORCH_TPU_|MASTER_|NODE_|NNODES|JOB_", name)]:
            del os.environ[name]
        os.environ.update(environment)
        try:
            distributed.set_tpu_launch_env(nproc_per_node=int(environment["TORCH_TPU_DEVICES_PER_HOST"]))
            os.write(writing, json.dumps({name: os.environ.get(name) for name in COMPUTED}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


@pytest.mark.parametrize("slice_", KNOWN, ids=lambda slice_: slice_.name)
def test_they_are_those_of_the_helper_but_for_the_ports(slice_: Accelerator) -> None:
    addresses = tuple(f"10.{number >> 8}.{number & 255}.2" for number in range(slice_.hosts))
    for worker in sorted({0, slice_.hosts // 2, slice_.hosts - 1}):
        ours = rank_environments(Cluster(worker, addresses, slice_.name))[-1]
        topology = ",".join(map(str, (*slice_.topology, 1)[:3]))
        shape = {"TORCH_TPU_TOPOLOGY": topology, "TORCH_TPU_DEVICES_PER_HOST": str(slice_.chips_per_host)}
        gke = {"TPU_WORKER_HOSTNAMES": ",".join(addresses), "JOB_COMPLETION_INDEX": str(worker)}
        theirs = ask_helper({**gke, **shape})
        for name in SAME:
            assert ours[name] == theirs[name], name
        hosts = [[address.rpartition(":")[0] for address in each[ADDRESSES].split(",")] for each in (ours, theirs)]
        assert hosts[0] == hosts[1]
        assert ours["WORLD_SIZE"] == str(len(hosts[1]))
        assert ask_helper(ours) == {name: ours[name] for name in COMPUTED}, "the helper leaves ours as they are"


@pytest.mark.parametrize("name", ["v4-16", "v5litepod-8"])
def test_a_pod_of_the_rendered_manifest_gets_them_with_gkes_variables(name: str) -> None:
    """The pod's own variables are those of the golden manifest; the test cluster adds GKE's, and the Job's index."""
    manifests = yaml.safe_load_all((GOLDEN / f"jobset-{name}.yaml").read_text())
    jobset = next(found for found in manifests if found["kind"] == "JobSet")
    [replicated] = jobset["spec"]["replicatedJobs"]
    job = {**replicated["template"], "metadata": {"name": f"{jobset['metadata']['name']}-{replicated['name']}-0"}}
    job["spec"]["template"]["spec"].setdefault("subdomain", jobset["metadata"]["name"])
    container = job["spec"]["template"]["spec"]["containers"][0]
    pods = [_injected(container, job, index, webhook=True)["env"] for index in range(ACCELERATORS[name].hosts)]
    environments = [{each["name"]: each["value"] for each in pod if "value" in each} for pod in pods]
    ranks = [rank for told in environments for rank in rank_environments(discover(told))]
    assert [rank["RANK"] for rank in ranks] == [str(number) for number in range(ACCELERATORS[name].chips)]
    for told, ours in zip(environments, ranks[:: ACCELERATORS[name].chips_per_host], strict=True):
        shape = {key: ours[key] for key in ("TORCH_TPU_TOPOLOGY", "TORCH_TPU_DEVICES_PER_HOST")}
        theirs = ask_helper({**told, **shape})
        assert {key: ours[key] for key in SAME} == {key: theirs[key] for key in SAME}
        assert ask_helper({**told, **ours}) == {key: ours[key] for key in COMPUTED}


def test_the_image_has_the_version_of_which_we_use_these_internal_names() -> None:
    assert importlib.metadata.version("torch_tpu") == VERSION
    assert callable(_loader._init_device)
    names = {name.removeprefix("TPU ") for name in hardware._PCI_DEVICE_ID_TO_NAME.values()}
    assert names >= set(GENERATIONS)
    assert not names & {"v2", "v3"}
