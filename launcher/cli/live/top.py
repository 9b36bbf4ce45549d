"""`tpu-launch top`: a live view of a run in the terminal."""

from __future__ import annotations

import contextlib
import shutil

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from launcher.cli.options import configured, machine, open_provider, run_context
from launcher.config import Config
from launcher.errors import LaunchError


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--every",
    "seconds",
    type=click.FloatRange(1.0, 3600.0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option(
    "--columns", type=click.IntRange(40, 1000), help="Of the frame.  [default: those of the terminal, 80 without one]"
)
@configured
def top(config: Config, once: bool, seconds: float, columns: int | None) -> None:
    """Watch the slice's newest run: step, loss curve, examples/s, data wait, hosts with their memory, cost so far.
    Ctrl-C ends it; the run goes on."""
    from launcher.run.live.frame import render
    from launcher.run.live.top import Top

    def width() -> int:
        return columns or shutil.get_terminal_size((80, 24)).columns

    with contextlib.closing(open_provider(config)) as provider:
        view = Top(config, run_context(), provider)
        if once:
            for line in render(view.look(), width()):
                click.echo(line)
            return
        console = Console(highlight=False)
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                try:
                    frame = render(view.look(), width())
                except LaunchError as error:  # the next look may succeed
                    frame = str(error).splitlines()
                live.update(Text("\n".join(frame), no_wrap=True, overflow="crop"), refresh=True)
                machine().clock.sleep(seconds)
