"""`tpu-train train` and `tpu-train evaluate`: the commands that all hosts of a slice run."""

from __future__ import annotations

import json
import os

import click

from training.cli.host_process import exit_overdue, join_cluster, run_and_exit
from training.cli.options import set_option, step_option


@click.command()
@click.argument("config")
@set_option
@click.option("--run-id", help="Name of the run's folder below `output`; the launcher gives it as TPU_LAUNCH_RUN_ID.")
@click.pass_obj
def train(began: float | None, config: str, overrides: tuple[str, ...], run_id: str | None) -> None:
    """Train as the YAML file CONFIG says, going on from the run's newest checkpoint.

    Exit codes: 0 finished, 2 bad configuration or data, 75 stopped and saved, 76 lost another host, anything else a
    failure.
    """
    from training.config import load
    from training.distributed.shutdown import install_signal_handlers
    from training.telemetry.phase_timer import PhaseTimer

    shutdown = install_signal_handlers()
    timer = PhaseTimer(began=began)
    with timer.phase("start"):
        settings = load(config, overrides)
        if run_id:
            os.environ["TPU_LAUNCH_RUN_ID"] = run_id
        cluster, rendezvous = join_cluster(settings, shutdown)
    stop_seconds = settings.checkpoint.stop_seconds
    shutdown.limit(stop_seconds, lambda: exit_overdue(rendezvous, stop_seconds))

    def run() -> None:
        from functools import partial

        from training.backends.tensorflow import pod
        from training.distributed.cluster import tensorflow_environment
        from training.trainer import train as run_training

        if pod.applies(settings, cluster):
            tensorflow_environment(cluster, {})  # raises where TensorFlow can't drive this slice
            pod.run(settings, cluster, rendezvous, shutdown, partial(run_training, timer=timer))
        else:
            run_training(settings, cluster, rendezvous, shutdown, timer)

    run_and_exit(rendezvous, run)


@click.command()
@click.argument("model")
@click.option("-c", "--config", required=True, help="The YAML file whose data.evaluation is used.")
@set_option
@step_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the confusion matrix of a classifier.")
def evaluate(model: str, config: str, overrides: tuple[str, ...], step: int | None, as_json: bool) -> None:
    """Figures of MODEL, a run's folder or a model folder as `export` writes it, over the whole evaluation set. On a
    slice: on every host.

    \b
    tpu-train evaluate runs/local -c run.yaml --step 500
    tpu-train evaluate runs/local/model -c run.yaml --json
    """
    from training.config import load
    from training.distributed.shutdown import install_signal_handlers
    from training.telemetry.text import format_figures

    shutdown = install_signal_handlers()
    settings = load(config, overrides)
    out = os.fdopen(os.dup(1), "w")  # for the figures alone: libraries print to standard output too
    os.dup2(2, 1)
    cluster, rendezvous = join_cluster(settings, shutdown)

    def run() -> None:
        from training import evaluate as evaluation

        result = evaluation.evaluate(model, settings, cluster, rendezvous, shutdown, step)
        rendezvous.meet("end")
        if cluster.is_first:
            text = f"{result.model}, {result.examples} examples: {format_figures(result.figures)}"
            print(json.dumps(result.as_json()) if as_json else text, file=out, flush=True)

    run_and_exit(rendezvous, run)
