"""`tpu-launch notebook`: Jupyter in the live container of a host, through a tunnel."""

from __future__ import annotations

from collections.abc import Callable

import click

from launcher.cli import terminal
from launcher.cli.options import configured, machine, run_context, run_option
from launcher.cli.ssh import find_port, open_tunnel
from launcher.config import Config
from launcher.errors import LaunchError
from launcher.provider import CommandReport
from training.machine.threads import Future


@click.command()
@run_option
@click.option("--host", type=click.IntRange(0), default=0, show_default=True, help="The host, by worker index.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8888, show_default=True, help="On the host; the next free one."
)
@click.option(
    "--local-port", type=click.IntRange(1, 65535), help="Here, on 127.0.0.1.  [default: the same, or a free one]"
)
@configured
def notebook(config: Config, run_id: str | None, host: int, port: int, local_port: int | None) -> None:
    """Start Jupyter in the live container of a host, and print its address with the token. Ctrl-C ends it; the run goes
    on."""
    from launcher.run.live import execution
    from launcher.run.live import notebook as notebooks

    with execution.live_session(config, run_context(), run_id) as session:
        execution.choose_workers(session.config, host)
        terminal.say(f"run {session.ledger.run_id}: starting Jupyter on host {host}")
        jupyter = notebooks.start(session, host, port)
        local = find_port(local_port, jupyter.port)
        text = f"http://127.0.0.1:{local}/?token={jupyter.token} is Jupyter on host {host}; Ctrl-C ends it"
        try:
            open_tunnel(
                session.config,
                host,
                jupyter.port,
                local,
                text,
                on_start=lambda end: machine().threads.start(_end_after, jupyter.ended, end),
            )
        except LaunchError:
            if jupyter.ended.done():
                raise LaunchError(f"Jupyter on host {host} has ended") from None
            raise
        terminal.say("Jupyter is ended; the run goes on")


def _end_after(ended: Future[list[CommandReport]], end: Callable[[], None]) -> None:
    """Ends the tunnel when Jupyter has ended by itself."""
    ended.exception()
    end()
