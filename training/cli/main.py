"""`tpu-train`: what runs in the container. Parses, calls, and turns every error into one message and an exit code
(training/errors.py).

    tpu-train tokenizer ...                 make a tokenizer            (training/cli/data.py)
    tpu-train shards ...                    make a dataset
    tpu-train train CONFIG                  train, on every host of the slice
    tpu-train evaluate MODEL -c CONFIG      figures of a checkpoint or a model folder over the evaluation set
    tpu-train export RUN OUT                write a run's model as a Hugging Face folder
    tpu-train push RUN REPOSITORY           the same to the Hugging Face Hub
    tpu-train predict FOLDER TEXT           fill the mask in a text, or name its class
    tpu-train check CONFIG                  what in a step will be slow on a TPU
    tpu-train report RUN                    write report.html of a run
    tpu-train checkpoint list|show|verify   look at a run's checkpoints
    tpu-train checkpoint restore RUN NEW    begin another run with one

Groups import what they need when they are called, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import click

from training.cli.lazy_group import LazyCommand, LazyGroup
from training.errors import Exit, LostPeer, StopRequested, TrainError, is_out_of_memory

if TYPE_CHECKING:
    from training.config import TrainerConfig
    from training.distributed.cluster import Cluster
    from training.distributed.rendezvous import Rendezvous
    from training.distributed.shutdown import ShutdownRequest

_BEGAN = time.monotonic()
OUT_OF_MEMORY = "lower train.global_batch_size, raise train.gradient_accumulation, or take precision: bf16"
_LAZY_COMMANDS = {
    "tokenizer": LazyCommand("training.cli.data:tokenizer", "Make a tokenizer from text."),
    "shards": LazyCommand("training.cli.data:shards", "Make a dataset of TFRecord shards."),
    "preflight": LazyCommand(
        "training.cli.preflight:preflight", "Compile the step for a TPU that is not there: does it fit?"
    ),
    "dataset": LazyCommand("training.cli.data:dataset", "Look at a dataset, and check it."),
}


@click.group(cls=LazyGroup, lazy_commands=_LAZY_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def tpu_train() -> None:
    """Trains Transformers on every host of a Cloud TPU slice."""


@tpu_train.command()
@click.argument("config")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the file, for example train.steps=100.",
)
@click.option("--run-id", help="Name of the run's folder below `output`; the launcher gives it as TPU_LAUNCH_RUN_ID.")
def train(config: str, overrides: tuple[str, ...], run_id: str | None) -> None:
    """Train as the YAML file CONFIG says, going on from the run's newest checkpoint.

    Exit codes: 0 finished, 2 bad configuration or data, 75 stopped and saved, 76 lost another host, anything else a
    failure.
    """
    from training.config import load
    from training.distributed import shutdown as stopping
    from training.telemetry.phase_timer import PhaseTimer

    asked = stopping.install_signal_handlers()
    clock = PhaseTimer(began=_BEGAN)
    with clock.phase("start"):
        settings = load(config, overrides)
        if run_id:
            os.environ["TPU_LAUNCH_RUN_ID"] = run_id
        cluster, rendezvous = _meet(settings, asked)
    asked.limit(settings.checkpoint.stop_seconds, lambda: _overdue(rendezvous, settings.checkpoint.stop_seconds))

    def run() -> None:
        from training.backends.tensorflow import pod as single_client
        from training.distributed.cluster import tensorflow_environment
        from training.trainer import train as run

        if single_client.applies(settings, cluster):
            tensorflow_environment(cluster, {})  # is it TensorFlow for TPUs?
            single_client.run(settings, cluster, rendezvous, asked, partial(run, clock=clock))
        else:
            run(settings, cluster, rendezvous, asked, clock)

    _together(rendezvous, run)


def _together(rendezvous: Rendezvous, work: Callable[[], None]) -> NoReturn:
    """Does what all hosts do, tells the others how it ended here, and leaves with its exit code."""
    code, message = Exit.FAILED, "unexpected error"
    try:
        work()
        code, message = Exit.FINISHED, ""
    except TrainError as error:
        code, message = error.exit_code, _report(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            message = f"out of memory: {OUT_OF_MEMORY}\n  {message}"
            print(f"tpu-train: error: {message}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
    finally:
        rendezvous.close(code, message)
        # The framework's threads may not survive an orderly end of the interpreter, and the exit code is a promise.
        _leave(code)


def _meet(settings: TrainerConfig, asked: ShutdownRequest) -> tuple[Cluster, Rendezvous]:
    """Who this host is, and how it meets the others."""
    from training.distributed.cluster import discover
    from training.distributed.rendezvous import join

    cluster, waits = discover(), settings.rendezvous
    return cluster, join(
        cluster, asked, start_seconds=waits.start_seconds, seconds=waits.seconds, lost_seconds=waits.lost_seconds
    )


@tpu_train.command()
@click.argument("model")
@click.option("-c", "--config", required=True, help="The YAML file whose data.evaluation is used.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the file.")
@click.option("--step", type=int, help="Of this checkpoint; the newest, unless given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the confusion matrix of a classifier.")
def evaluate(model: str, config: str, overrides: tuple[str, ...], step: int | None, as_json: bool) -> None:
    """Figures of MODEL, a run's folder or a model folder as `export` writes it, over the whole evaluation set. On a
    slice: on every host.

    \b
    tpu-train evaluate runs/local -c run.yaml --step 500
    tpu-train evaluate runs/local/model -c run.yaml --json
    """
    from training.config import load
    from training.distributed import shutdown as stopping
    from training.telemetry import text as report

    asked = stopping.install_signal_handlers()
    settings = load(config, overrides)
    out = os.fdopen(os.dup(1), "w")  # for the figures alone: libraries print what they like to standard output
    os.dup2(2, 1)
    cluster, rendezvous = _meet(settings, asked)

    def run() -> None:
        from training.evaluate import evaluate

        found = evaluate(model, settings, cluster, rendezvous, asked, step)
        rendezvous.meet("end")
        if cluster.is_first:
            people = f"{found.model}, {found.examples} examples: {report.format_figures(found.figures)}"
            print(json.dumps(found.as_json()) if as_json else people, file=out, flush=True)

    _together(rendezvous, run)


@tpu_train.command()
@click.argument("run")
@click.argument("out")
@click.option("--step", type=int, help="Of this checkpoint; the newest, unless given.")
@click.option("--best", is_flag=True, help="Of the checkpoint with the best figure (checkpoint.best).")
def export(run: str, out: str, step: int | None, best: bool) -> None:
    """Write the model of RUN, a run's folder, to OUT in Hugging Face's layout."""
    from training.checkpoint import admin as inspect
    from training.models.export import export_checkpoint

    if best and step is not None:
        raise click.UsageError("give --step or --best, not both")
    step = inspect.best_saved_step(run) if best else step
    click.echo(f"{out}: the model after step {export_checkpoint(run, out, step)}")


@tpu_train.command()
@click.argument("run")
@click.argument("repository")
@click.option("--step", type=int, help="Of this checkpoint; the newest, unless given.")
@click.option("--private/--public", default=True, show_default=True, help="Of a repository that does not exist yet.")
@click.option("--beside", is_flag=True, hidden=True, help="Started by a run: gives way to it, and answers in JSON.")
def push(run: str, repository: str, step: int | None, private: bool, beside: bool) -> None:
    """Push the model of RUN, a run's folder, to REPOSITORY (org/name) on the Hugging Face Hub, with the token in
    HF_TOKEN."""
    if beside:
        os.nice(10)
    from training.models import hub

    done, commit = hub.push_model(run, repository, step, private)
    click.echo(
        json.dumps({"step": done, "commit": commit})
        if beside
        else f"{repository}: the model after step {done}: {commit}"
    )


@tpu_train.command()
@click.argument("folder")
@click.argument("text")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="How many answers.")
def predict(folder: str, text: str, top: int) -> None:
    """Fill the mask in TEXT, or name its class, with the model in FOLDER, as `export` writes it.

    \b
    tpu-train predict runs/local/model "The [MASK] statement ends a loop."
    tpu-train predict runs/banking77/model "My card has not arrived yet."
    """
    from training.models.predict import classify, fill_mask, is_classifier

    if is_classifier(folder):
        for label in classify(folder, text, top):
            click.echo(f"{label.score:.4f}  {label.name}")
        return
    for answer in fill_mask(folder, text, top):
        click.echo(f"{answer.score:.4f}  {answer.token!r}  {answer.text}")


@tpu_train.command()
@click.argument("config", required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the file.")
@click.option(
    "--module", metavar="FILE:FUNCTION", help="Instead of CONFIG: a function that returns your torch.nn.Module."
)
@click.option(
    "--inputs",
    metavar="FILE:FUNCTION",
    help="With --module: a function that returns its batches, on the CPU: dicts, tuples or tensors.",
)
@click.option("--steps", type=click.IntRange(min=2), default=4, show_default=True, help="How many steps to run.")
@click.option(
    "--shapes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --module: how many different shapes its batches may have.",
)
@click.option("--json", "as_json", is_flag=True, help="A list of findings as JSON.")
def check(
    config: str | None,
    overrides: tuple[str, ...],
    module: str | None,
    inputs: str | None,
    steps: int,
    shapes: int,
    as_json: bool,
) -> None:
    """Run a few steps on the CPU, with small batches, and report what XLA devices are slow at, each with its line.

    \b
    tpu-train check run.yaml
    tpu-train check --module my_model.py:build --inputs my_model.py:batches

    Data-dependent shapes, branches on tensors' values, and steps that compile again. Exits with 0 when there is none,
    with 1 when there is one.
    """
    from training.config import load
    from training.lint import steps as checks

    if (config is None) == (module is None) or (module is None) != (inputs is None):
        raise click.UsageError("give either CONFIG, or --module and --inputs")
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no finding
        found = (
            checks.check_files(str(module), str(inputs), steps, shapes)
            if config is None
            else checks.check(load(config, overrides), steps)
        )
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=1))
    else:
        for each in found:
            click.echo(str(each))
        click.echo(f"{steps} steps: {len(found)} finding(s)" if found else f"{steps} steps: clean")
    if found:
        sys.exit(Exit.FAILED)


@tpu_train.command("report")
@click.argument("run")
@click.option("--out", help="Another file than report.html in the run's folder.")
def write_report(run: str, out: str | None) -> None:
    """Write report.html from what is in RUN, a run's folder: finished, stopped or failed."""
    from training.telemetry import html as page

    click.echo(page.write_report(run, out))


@tpu_train.group()
def checkpoint() -> None:
    """Look at the checkpoints of a run, and verify them."""


@checkpoint.command("list")
@click.argument("folder")
def list_checkpoints(folder: str) -> None:
    """List the committed checkpoints below FOLDER, a run's folder."""
    from training.checkpoint import admin as inspect

    click.echo(inspect.render_table(folder))


@checkpoint.command("show")
@click.argument("folder")
@click.option("--step", type=int, help="The newest, unless given.")
def show_checkpoint(folder: str, step: int | None) -> None:
    """Print the manifest of a checkpoint as JSON."""
    from training.checkpoint import admin as inspect

    click.echo(inspect.render_manifest(folder, step))


@checkpoint.command("restore")
@click.argument("folder")
@click.argument("new_run")
@click.option("--step", type=int, help="The newest, unless given.")
def restore_checkpoint(folder: str, new_run: str, step: int | None) -> None:
    """Copy a checkpoint of the run's folder FOLDER to NEW_RUN, the folder of a run that has none.

    \b
    tpu-train checkpoint restore gs://b/runs/a gs://b/runs/a2 --step 4000
    tpu-train train file.yaml --run-id a2           goes on from step 4000
    """
    from training.checkpoint import admin as inspect

    click.echo(f"{new_run}: goes on from step {inspect.copy_to_run(folder, new_run, step)}")


@checkpoint.command("verify")
@click.argument("folder")
@click.option("--step", type=int, help="Only this one.")
def verify_checkpoint(folder: str, step: int | None) -> None:
    """Read every byte of the checkpoints below FOLDER. Exits with 1 if one is damaged."""
    from training.checkpoint import admin as inspect

    text, good = inspect.verify_checkpoints(folder, step)
    click.echo(text)
    if not good:
        sys.exit(Exit.FAILED)


def main() -> None:
    """Entry point of `tpu-train`."""
    from training.yaml_file import ConfigError

    try:
        tpu_train(prog_name="tpu-train", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(Exit.BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except ConfigError as error:
        print(f"tpu-train: bad configuration:\n{error}", file=sys.stderr)
        sys.exit(Exit.BAD_INPUT)
    except TrainError as error:
        _report(error)
        sys.exit(error.exit_code)


def _report(error: TrainError) -> str:
    kind = "stopped" if isinstance(error, StopRequested) else "lost peer" if isinstance(error, LostPeer) else "error"
    print(f"tpu-train: {kind}: {error}", file=sys.stderr, flush=True)
    return str(error)


def _overdue(rendezvous: Rendezvous, seconds: float) -> NoReturn:
    """Leaves while the main thread is in something that does not end in time. The other hosts leave too."""
    message = f"could not stop in good order within {seconds:g} s (checkpoint.stop_seconds); the run goes on from its last commit"
    print(f"tpu-train: stopped: {message}", file=sys.stderr, flush=True)
    rendezvous.close(Exit.SAVED, message, overdue=True)
    _leave(Exit.SAVED)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
