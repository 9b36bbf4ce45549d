"""The commands of `tpu-train` that every host of a slice runs: train, evaluate, check-devices, exec; and `profile`,
which runs beside `train`.

The launcher decides from the exit code alone. So `ending_process` leaves with `os._exit` as soon as the code is known:
a framework's threads may crash or hang in an orderly end of the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

import click

from training.cli import EndAtOnce, option, set_option, step_option
from training.errors import Exit, LostPeer, OutOfMemory, TrainError, is_out_of_memory
from training.machine import SYSTEM, Machine, exit_at_once, tell
from training.registry import BACKENDS

if TYPE_CHECKING:
    from training.config import TrainerConfig
    from training.distributed.cluster import Cluster
    from training.distributed.rendezvous import Rendezvous
    from training.distributed.shutdown import ShutdownRequest


@click.command()
@click.argument("config")
@set_option
@option("--run-id", help="Name of the run's folder below `output`; the launcher gives it as TPU_LAUNCH_RUN_ID.")
@click.pass_obj
def train(began_monotonic: float | None, config: str, overrides: tuple[str, ...], run_id: str | None) -> None:
    """Train as the YAML file CONFIG says, going on from the run's newest checkpoint.

    Exit codes: 0 finished, 2 bad configuration or data, 75 stopped and saved, 76 lost another host, anything else a
    failure.
    """
    from training.config import load
    from training.distributed.rendezvous import join
    from training.distributed.shutdown import install_signal_handlers
    from training.telemetry.host_progress import PhaseTimer

    shutdown = install_signal_handlers()
    timer = PhaseTimer(began=began_monotonic)
    with timer.phase("start"):
        settings = load(config, overrides)
        if run_id:
            os.environ["TPU_LAUNCH_RUN_ID"] = run_id
        _start_chip_processes(settings.backend)
        cluster = _discover(settings.backend)
        rendezvous = join(cluster, shutdown, settings.rendezvous)
    stop_seconds = settings.checkpoint.stop_seconds
    shutdown.limit(stop_seconds, lambda: exit_overdue(rendezvous, stop_seconds))

    with ending_process(rendezvous):
        with timer.phase("imports"):
            from training.trainer import train as run_training
        with _program_host(settings, cluster, rendezvous, shutdown) as host:
            if host:
                run_training(settings, *host, shutdown, timer)


@click.command()
@click.argument("model")
@option("-c", "--config", required=True, help="The YAML file whose data.evaluation is used.")
@set_option
@step_option
@option("--json", "as_json", is_flag=True, help="One JSON object, with the confusion matrix of a classifier.")
def evaluate(model: str, config: str, overrides: tuple[str, ...], step: int | None, as_json: bool) -> None:
    """Evaluate MODEL, a run's folder, a model folder or a name on the Hub, on the whole evaluation set. On a slice, run
    it on every host; the first one prints the figures, alone on standard output.

    \b
    tpu-train evaluate runs/local -c run.yaml --step 500
    tpu-train evaluate runs/local/model -c run.yaml --json
    """
    from training.config import load
    from training.distributed.rendezvous import join
    from training.distributed.shutdown import install_signal_handlers
    from training.telemetry.console import format_figures

    shutdown = install_signal_handlers()
    settings = load(config, overrides)
    _start_chip_processes(settings.backend)
    out = os.fdopen(os.dup(1), "w")  # for the figures alone: libraries print to standard output too
    os.dup2(2, 1)
    cluster = _discover(settings.backend)
    rendezvous = join(cluster, shutdown, settings.rendezvous)

    with ending_process(rendezvous), _program_host(settings, cluster, rendezvous, shutdown) as host:
        if host:
            from training import evaluate as evaluation

            result = evaluation.evaluate(model, settings, *host, shutdown, step)
            host[1].meet("end")
            if host[0].is_first:
                text = f"{result.model}, {result.examples} examples: {format_figures(result.figures)}"
                print(json.dumps(result.as_json(), allow_nan=False) if as_json else text, file=out, flush=True)


@click.command("check-devices")
@option("--backend", type=click.Choice(list(BACKENDS)), default="torch-xla", help="Framework.")
@option("--output", metavar="URL", help="Folder in Cloud Storage whose speed is measured.")
@option("--seconds", type=click.FloatRange(1), default=120, help="How long to wait for the other hosts.")
def check_devices(backend: str, output: str | None, seconds: float) -> None:
    """Check this host's devices together with all hosts of the slice: number, memory, a matrix product, a sum over all
    devices; and clock, disk and bucket.

    Prints a line for each fact. Exits with 0 if there is no problem that would fail a run, 76 if another host was
    lost, 2 for a wrong accelerator or image, else with 1.
    """
    from training.device_check import check_host, find_problems, print_fact
    from training.distributed.config import RendezvousSection
    from training.distributed.rendezvous import join
    from training.distributed.shutdown import install_signal_handlers
    from training.run_setup import prepare_devices

    _start_chip_processes(backend)
    facts: dict[str, object] = {}
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # of the processes of a host, for facts that all have

    def report(name: str, value: object) -> None:
        facts[name] = value
        if speaks or name in ("error", "lost"):
            print_fact(name, value)

    shutdown, cluster = install_signal_handlers(), _discover(backend)
    # The option has no upper bound, unlike the section of a file.
    limits = RendezvousSection.model_construct(start_seconds=seconds, seconds=seconds, lost_seconds=30.0)
    rendezvous = join(cluster, shutdown, limits)

    with ending_process(rendezvous):
        try:
            prepare_devices(backend, cluster)
            check_host(backend, output if speaks else None, cluster, rendezvous, report)
        except TrainError as error:
            report("lost" if isinstance(error, LostPeer) else "error", str(error))
            raise
        problems = find_problems(facts, len(cluster.all_addresses), cluster.accelerator_type)
        if fatal := [problem.message for problem in problems if problem.fatal]:
            raise TrainError("; ".join(fatal))


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@option(
    "--runtime",
    type=click.Choice(["torch-xla", "torch-tpu"]),
    default="torch-xla",
    help="PyTorch's runtime for TPUs; torch-tpu: v4 and newer.",
)
def exec_script(script: str, arguments: tuple[str, ...], runtime: str) -> None:
    """Run SCRIPT, a PyTorch program of your own, as one process for each chip of this host.

    \b
    tpu-train exec train.py --output_dir out --max_steps 100
    tpu-train exec --runtime torch-tpu train.py --steps 100

    As a run's command it starts on every host of a slice; Hugging Face's Trainer and Accelerate then train over all
    hosts. With torch-xla, CPU hosts and virtual TPUs have one process a host; gloo sums the gradients of CPU hosts.
    With torch-tpu, which needs TPUs, also virtual ones, the first process that fails ends the others, and the command
    has its exit code.
    """
    from training.cli.processes import run_chip_processes, run_on_host

    if runtime == "torch-tpu":
        raise EndAtOnce(run_chip_processes(["training.cli.processes", script, *arguments]))
    run_on_host(script, arguments)


@click.command()
@option("--steps", type=click.IntRange(1, 1000), default=5, help="Number of steps.")
@option("--name", help="Name of the profile; the same on all hosts.  [default: the time]")
@option("--seconds", type=click.FloatRange(1.0), default=600.0, help="How long to wait for the steps.")
@option("--worker", type=click.IntRange(0), help="Which of several trainers on this machine.  [default: this host's]")
def profile(steps: int, name: str | None, seconds: float, worker: int | None) -> None:
    """Profile the next steps of the trainer that runs on this host, and print the URL of the profile.

    Run it beside the trainer, in its container, as `tpu-launch profile` does. Training continues.
    """
    from training.distributed.cluster import discover
    from training.profiler import folder_of, request

    worker = discover().worker if worker is None else worker
    answer = request(folder_of(worker), name or time.strftime("%Y_%m_%d_%H_%M_%S"), steps, seconds)
    click.echo(f"steps {answer.first} to {answer.last}: {answer.file}")


def _start_chip_processes(backend: str) -> None:
    """With TorchTPU, runs this command in a process for each chip of the host, and exits with their exit code; returns
    in each of these processes, and at once with other backends."""
    from training.distributed import torch_tpu

    if backend == torch_tpu.RUNTIME and "RANK" not in os.environ:
        from training.cli.processes import run_chip_processes

        raise EndAtOnce(run_chip_processes(["training.cli", *sys.argv[1:]]))


def _discover(backend: str) -> Cluster:
    """Returns this host's cluster; with TorchTPU, one in which each process, one for each chip, counts as a host.
    Raises BadInput if the variables or the metadata server contradict themselves."""
    from training.distributed import torch_tpu
    from training.distributed.cluster import discover

    cluster = discover()
    return torch_tpu.cluster_of_rank(cluster, os.environ) if backend == torch_tpu.RUNTIME else cluster


def _program_host(
    config: TrainerConfig, cluster: Cluster, rendezvous: Rendezvous, shutdown: ShutdownRequest
) -> AbstractContextManager[tuple[Cluster, Rendezvous] | None]:
    """Returns a context with the cluster and the rendezvous of the program on this host. With TensorFlow on a TPU slice
    of several hosts, host 0 runs the program for all: the others get None when it is done, and serve it till then."""
    from training.distributed.cluster import device_kind

    if config.backend == "tensorflow" and cluster.hosts > 1 and device_kind() == "TPU":
        from training.backends.tensorflow import pod

        return pod.open_host(config, cluster, rendezvous, shutdown)
    return contextlib.nullcontext((cluster, rendezvous))


@contextlib.contextmanager
def ending_process(rendezvous: Rendezvous, machine: Machine = SYSTEM) -> Iterator[None]:
    """Ends the process after the block, or at its error, which it prints: tells the other hosts how this one ended, and
    exits with 0, a TrainError's code or FAILED. SystemExit and Ctrl-C in the block count as FAILED, unprinted."""
    code, message = Exit.FAILED, "unexpected error"
    try:
        yield
        code, message = Exit.FINISHED, ""
    except TrainError as error:
        code, message = error.exit_code, str(error)
        print_error(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            message = str(OutOfMemory(message))
            tell(f"error: {message}")
        else:
            traceback.print_exc()
    finally:
        rendezvous.close(code, message)
        exit_at_once(code, machine)


def exit_overdue(rendezvous: Rendezvous, seconds: float, machine: Machine = SYSTEM) -> NoReturn:
    """Ends the process with exit code SAVED, after a message, and with it the attempt on all hosts. Does not wait: a
    timer thread calls it when the main thread has not stopped `seconds` after a stop request."""
    limit = f"{seconds:g} s (checkpoint.stop_seconds)"
    message = f"could not stop in good order within {limit}; the run goes on from its last commit"
    tell(f"stopped: {message}")
    rendezvous.close(Exit.SAVED, message, overdue=True)
    exit_at_once(Exit.SAVED, machine)


def print_error(error: TrainError) -> None:
    """Prints an error's message on standard error, after its heading."""
    tell(f"{error.heading}{error}")
