"""`tpu-launch profile`: what the steps of a live run spend their time on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from launcher import shell
from launcher.cli import terminal
from launcher.cli.live.execution import HOST
from launcher.cli.options import configured, run_context, run_option
from launcher.cli.ssh import find_port
from launcher.config import Config
from launcher.errors import LaunchError
from launcher.home import home

_MORE_SECONDS = 30  # for the answer, after the trainer's own time-out
_DAYS = 7 * 24 * 3600.0
_PORT = 6006  # TensorBoard's own


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
@click.option("--open", "opens", is_flag=True, help="Then show it in the TensorBoard of this machine, until Ctrl-C.")
@configured
def profile(config: Config, run_id: str | None, steps: int, host: int | None, seconds: int, opens: bool) -> None:
    """Profile the next steps of a run that trains with `tpu-train`, on one host or on all; the training goes on.

    The profile is written to `profiles/` in the run's folder. TensorBoard shows it, with the plugin of the package
    `xprof`; --open copies it to .tpu-launch/profiles for that.
    """
    from launcher.run.live import execution
    from launcher.run.live import profile as profiles

    tensorboard = profiles.find_tensorboard() if opens else None
    lines: list[str] = []
    name = time.strftime("%Y_%m_%d_%H_%M_%S")
    words = ("tpu-train", "profile", f"--steps={steps}", f"--name={name}", f"--seconds={seconds}")
    command = execution.Command(words, host, seconds + _MORE_SECONDS)
    reports = execution.execute(config, run_context(), run_id, command, lines.append)
    for report in reports:
        if report.exit_code is None:
            terminal.error(f"host {report.worker}: {report.problem}")
    code = execution.exit_code(reports)
    if code == 0 and tensorboard:
        folder = home() / "profiles" / name
        profiles.fetch(lines, folder)
        _show(tensorboard, folder)
    elif code == 0:
        terminal.say(f"look at it: `tensorboard --logdir FOLDER`, FOLDER being the path above up to profiles/{name}")
    sys.exit(code)


def _show(tensorboard: str, folder: Path) -> None:
    """Runs TensorBoard until Ctrl-C. Raises LaunchError when it ends before."""
    port = find_port(None, _PORT)
    terminal.say(f"TensorBoard shows it at http://127.0.0.1:{port}/#profile when it has started; Ctrl-C ends it")
    command = [tensorboard, "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    try:
        result = shell.stream(command, click.echo, timeout=_DAYS)
    except KeyboardInterrupt:
        return
    raise LaunchError(f"TensorBoard ended by itself with {result.returncode}; its last lines:\n{result.stdout[-2000:]}")
