"""`tpu-launch exec`: a command in the live containers of a run."""

from __future__ import annotations

import shlex
import sys

import click

from launcher.cli import terminal
from launcher.cli.options import configured, run_context, run_option
from launcher.config import Config
from launcher.errors import BadInput


class _Host(click.ParamType[int | None]):
    """A worker index, or `all`."""

    name = "N|all"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "all":
            return None
        if not value.isdigit():
            self.fail(f"{value!r} is neither a worker index nor `all`", param, ctx)
        return int(value)


HOST = _Host()


@click.command("exec", context_settings={"ignore_unknown_options": True})
@run_option
@click.option("--host", type=HOST, default="all", show_default=True, help="This host, by worker index.")
@click.option(
    "--timeout",
    "seconds",
    type=click.IntRange(1, 7 * 24 * 3600),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="After which the command is ended.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@configured
def exec_(config: Config, run_id: str | None, host: int | None, seconds: int, command: tuple[str, ...]) -> None:
    """Run a command in the live container of every host, or of one; it has no standard input.

    Each line has its host in front. The exit code is 0, or that of the host that failed first. Ctrl-C ends the
    command on its hosts; the run goes on.

    \b
    tpu-launch exec -f run.yaml -- nproc
    tpu-launch exec -f run.yaml --host 0 -- sh -c 'df -h; free -g'
    """
    from launcher.run.live import execution

    if not command:
        raise BadInput("exec: no command: `tpu-launch exec -f run.yaml -- COMMAND`")
    try:
        reports = execution.execute(config, run_context(), run_id, execution.Command(command, host, seconds))
    except KeyboardInterrupt:
        terminal.say("interrupted: the command is ended on its hosts; the run goes on")
        raise
    for report in reports:
        if report.exit_code is None:
            terminal.error(f"host {report.worker}: {shlex.join(command)[:200]}: {report.problem}")
        elif report.exit_code:
            terminal.say(f"host {report.worker}: exit code {report.exit_code}")
    sys.exit(execution.exit_code(reports))
