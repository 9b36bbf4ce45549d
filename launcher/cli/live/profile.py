"""`tpu-launch profile`: what the steps of a live run spend their time on."""

from __future__ import annotations

import sys
import time

import click

from launcher.cli import terminal
from launcher.cli.live.execution import HOST
from launcher.cli.options import configured, run_context, run_option
from launcher.config import Config

_MORE_SECONDS = 30  # for the answer, after the trainer's own time-out


@click.command()
@run_option
@click.option("--steps", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many.")
@click.option("--host", type=HOST, default="0", show_default=True, help="This host, by worker index.")
@click.option(
    "--timeout",
    "seconds",
    type=click.IntRange(1, 24 * 3600),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the steps.",
)
@configured
def profile(config: Config, run_id: str | None, steps: int, host: int | None, seconds: int) -> None:
    """Profile the next steps of a run that trains with `tpu-train`, on one host or on all; the training goes on.

    The profile is written to `profiles/` in the run's folder. TensorBoard shows it, with the plugin of the package
    `xprof`.
    """
    from launcher.run.live import execution

    name = time.strftime("%Y_%m_%d_%H_%M_%S")
    words = ("tpu-train", "profile", f"--steps={steps}", f"--name={name}", f"--seconds={seconds}")
    reports = execution.execute(config, run_context(), run_id, execution.Command(words, host, seconds + _MORE_SECONDS))
    for report in reports:
        if report.exit_code is None:
            terminal.error(f"host {report.worker}: {report.problem}")
    code = execution.exit_code(reports)
    if code == 0:
        terminal.say(f"look at it: `tensorboard --logdir FOLDER`, FOLDER being the path above up to profiles/{name}")
    sys.exit(code)
