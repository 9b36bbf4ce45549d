"""Runs a PyTorch program of the user's own in the processes that its libraries expect on a host: `tpu-train exec`.

    tpu-train exec train.py --output_dir out
    tpu-train exec --runtime torch-tpu train.py

The program imports nothing of this package. Hugging Face's Trainer and Accelerate, and torch.distributed, read the
number of processes from the environment; every host of a slice runs this command.

* TPU, v4 and newer: one process for each chip of the host (`torch_xla.launch`). Gradients are summed over all chips of
  the slice. On v2 and v3, torch_xla would run two replicas as threads of one process.
* CPU, several hosts (an emulated slice): one process, with the variables that torchrun sets, and torch_xla disabled for
  Hugging Face's libraries: it has no collective between CPU processes, so each host would train a model of its own,
  without an error. The Trainer wraps the model in DistributedDataParallel, which sums with gloo.
* A virtual TPU (an emulated slice of one host): one process, with one of its devices.
* CPU, one host: one process, with torch_xla's CPU device.

With `--runtime torch-tpu`: one process for each chip, on chips and on virtual TPUs of any number of hosts, with the
variables of training/distributed/torch_tpu.py; CPU hosts are refused.
"""

import importlib.metadata
import importlib.util
import os
import runpy
import secrets
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from training.accelerators import ACCELERATORS
from training.cli.rank_processes import run_ranks
from training.distributed import torch_tpu
from training.distributed.cluster import SECRET_VARIABLE, Cluster, device_kind, discover, tpu_environment
from training.errors import BadInput, Exit, TrainError
from training.telemetry.console import warn
from training.telemetry.progress_line import FILE_VARIABLE


def chip_process_environment(cluster: Cluster) -> dict[str, str]:
    """Returns the variables from which `torch_xla.launch` derives those of one process for each chip. torch_xla divides
    bounds by chips only if they have the names of hosts' bounds: it takes the bounds of processes, which
    `tpu_environment` returns, as final. Raises BadInput if the accelerator is unknown, has another number of hosts, or
    has two devices a chip (v2 and v3)."""
    environment = tpu_environment(cluster)
    accelerator = ACCELERATORS[environment["TPU_ACCELERATOR_TYPE"]]
    if accelerator.generation.devices_per_chip > 1:
        raise BadInput(
            f"tpu-train exec runs one process a chip, and a chip of {accelerator.name} has two devices, which "
            "torch_xla gives to threads of one process; use v4 or newer, or a command of your own"
        )
    del environment["CLOUD_TPU_TASK_ID"]
    environment["TPU_HOST_BOUNDS"] = environment.pop("TPU_PROCESS_BOUNDS")
    environment["TPU_CHIPS_PER_HOST_BOUNDS"] = environment.pop("TPU_CHIPS_PER_PROCESS_BOUNDS")
    return environment


def gloo_environment(cluster: Cluster) -> dict[str, str]:
    """Returns torchrun's variables for one process a host, and Hugging Face's switches for torch on the CPU.

    https://pytorch.org/docs/stable/elastic/run.html#environment-variables; transformers and accelerate read
    USE_TORCH_XLA and ACCELERATE_USE_CPU. One thread per process is torchrun's default, too.
    """
    return {
        "RANK": str(cluster.worker),
        "WORLD_SIZE": str(cluster.hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": cluster.addresses[0],
        "MASTER_PORT": str(cluster.gloo_port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "USE_TORCH_XLA": "0",
        "ACCELERATE_USE_CPU": "true",
    }


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a program in this process, as `python SCRIPT ARGUMENTS` would."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _run_chip_process(ordinal: int, script: str, arguments: Sequence[str]) -> None:
    """Runs a program in a process that `torch_xla.launch` started.

    Ends the process at once on an exception: the processes of other chips would wait for it in a collective forever,
    and the pool ends them as soon as one of its processes is gone. SystemExit reaches the parent with its code. Each
    process has a file of progress of its own."""
    if FILE_VARIABLE in os.environ:
        os.environ[FILE_VARIABLE] += f".{ordinal}"
    try:
        run_script(script, arguments)
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(Exit.FAILED)


def run_on_host(script: str, arguments: Sequence[str]) -> None:
    """Runs a program on this host of the slice, in as many processes as its devices need; where one is enough, in this
    one, and its exceptions pass. Changes os.environ. Raises BadInput if the image lacks torch_xla, or the accelerator
    is unknown or can't be used so; TrainError if a process ended early."""
    cluster, device = discover(), device_kind()
    os.environ["PJRT_DEVICE"] = device
    if device != "TPU" and cluster.hosts > 1:
        os.environ.update(gloo_environment(cluster))
        run_script(script, arguments)
        return
    if device == "TPU":
        os.environ.update(chip_process_environment(cluster))
    if importlib.util.find_spec("torch_xla") is None:
        raise BadInput("tpu-train exec needs torch_xla, which this image does not have: set image.backend: torch-xla")
    import torch_xla
    from torch_xla._internal.tpu import num_available_chips  # what `launch` counts; torch_xla's version is pinned

    # A virtual TPU has no chips on the PCI bus, and its processes could not exchange anything: one process, one device.
    single = device == "TPU" and num_available_chips() == 0
    try:
        torch_xla.launch(_run_chip_process, args=(script, arguments), debug_single_process=single)
    except BrokenProcessPool:
        raise TrainError(f"a process of {script} ended early; its traceback is above") from None


def run_chip_processes(module: Sequence[str]) -> int:
    """Runs a module with its arguments, as `python -m` would, in one process of TorchTPU for each chip of this host.
    Returns the exit code of the first process that failed, or 0. Warns of another version of torch_tpu than ours.
    Raises BadInput if the image has no torch_tpu, this is no TPU, or TorchTPU does not know it."""
    installed = next((found.version for found in importlib.metadata.distributions(name="torch_tpu")), None)
    if other := torch_tpu.find_other_version(installed):
        warn(other)
    if device_kind() != "TPU":
        raise BadInput(
            f"{torch_tpu.RUNTIME} needs TPU chips or a virtual TPU, and PJRT_DEVICE is CPU here: rehearse it "
            "on an emulated slice (tpu-launch --emulated)"
        )
    environments = torch_tpu.rank_environments(cluster := discover())
    shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # torchrun's default, too
    if cluster.hosts == 1 and SECRET_VARIABLE not in os.environ:
        shared[SECRET_VARIABLE] = secrets.token_hex()
    for environment in environments:
        if FILE_VARIABLE in os.environ:
            environment[FILE_VARIABLE] = f"{os.environ[FILE_VARIABLE]}.{environment['RANK']}"
    return run_ranks([sys.executable, "-m", *module], [{**shared, **environment} for environment in environments])
