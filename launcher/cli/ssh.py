"""`tpu-launch ssh` and `tpu-launch tunnel`: one gcloud session that belongs to the terminal."""

import contextlib
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable

import click

from launcher import shell
from launcher.cli import terminal
from launcher.cli.options import PORT, configured
from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.gcloud import explain_error
from launcher.tpu_vm import commands, slice_hints
from launcher.tpu_vm.host_scripts import EXECUTION_MARK, render

_DAYS = 7 * 24 * 3600.0
_TUNNEL_SECONDS = 120.0

host_option = click.option("--host", type=click.IntRange(0), default=0, help="The host, by worker index.")
local_port_option = click.option(
    "--local-port", type=PORT, help="Here, on 127.0.0.1.  [default: the same, or a free one]"
)


def _check_host(config: Config, host: int) -> None:
    """Raises BadInput for a host that the slice, as the candidate last seen, does not have."""
    placed = slice_hints.in_current_place(config)
    if host >= placed.accelerator.hosts:
        raise BadInput(
            f"--host {host}: a {placed.slice.accelerator_type} has hosts 0 to {placed.accelerator.hosts - 1}"
        )


@click.command(context_settings={"ignore_unknown_options": True})
@host_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@configured
def ssh(config: Config, host: int, command: tuple[str, ...]) -> None:
    """Open a shell on a host, outside the run's container, or run a command there; its exit code is ours (254 for a
    command's 255).

    \b
    tpu-launch ssh -f run.yaml --host 1
    tpu-launch ssh -f run.yaml --host 1 -- sudo docker ps
    """
    _check_host(config, host)
    if command:
        sys.exit(shell.attached(commands.ssh_command(config, remote_script(command), worker=str(host))))
    sys.exit(shell.attached(commands.shell_command(config, host)))


def remote_script(command: tuple[str, ...]) -> str:
    """Returns a shell script that runs the command's words unchanged, and once, although gcloud repeats the script when
    its connection breaks. Its exit code is the command's, but 254 for 255, which gcloud would take for ssh's."""
    return render("run_once", command=shlex.join(command), mark=f"{EXECUTION_MARK}{secrets.token_hex(8)}")


@click.command()
@host_option
@click.option("--port", type=PORT, required=True, help="On the host: 6006 for TensorBoard, 8888 for Jupyter.")
@local_port_option
@configured
def tunnel(config: Config, host: int, port: int, local_port: int | None) -> None:
    """Make a port of a host reachable on 127.0.0.1 here until Ctrl-C; prints the address. Fails if it ends by
    itself."""
    _check_host(config, host)
    local = find_port(local_port, port)
    text = f"http://127.0.0.1:{local} leads to port {port} of host {host}; Ctrl-C closes it"
    open_tunnel(config, host, port, local, text)
    terminal.say("the tunnel is closed")


def open_tunnel(
    config: Config,
    host: int,
    port: int,
    local: int,
    text: str,
    *,
    on_start: Callable[[Callable[[], None]], object] | None = None,
) -> None:
    """Makes a port of a host reachable as port `local` of 127.0.0.1; returns at Ctrl-C. Prints `text` once the tunnel
    listens. `on_start` is given a function that ends the tunnel. Raises LaunchError for any end but Ctrl-C."""
    forward = ["-N", "-oExitOnForwardFailure=yes", f"-L127.0.0.1:{local}:localhost:{port}"]
    over = threading.Event()
    threading.Thread(target=_announce, args=(local, text, over), daemon=True).start()
    try:
        command = commands.shell_command(config, host, forward)
        result = shell.stream(command, lambda line: None, timeout=_DAYS, on_start=on_start)
    except KeyboardInterrupt:
        return
    finally:
        over.set()
    if not result.ok:
        raise explain_error(result.stdout, ["gcloud", "compute", "tpus", "tpu-vm", "ssh", config.slice.name])
    raise LaunchError(f"the tunnel to host {host} ended by itself")


def find_port(wanted: int | None, preferred: int) -> int:
    """Returns the port `wanted` (BadInput if it is taken on 127.0.0.1), for None `preferred`, else any free one."""
    for port in [wanted] if wanted is not None else [preferred, 0]:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as probe:
            return int(probe.getsockname()[1])
    raise BadInput(f"port {wanted} of 127.0.0.1 is taken: choose another --local-port, or leave it out")


def _announce(local: int, text: str, over: threading.Event) -> None:
    """Prints the text once the local port accepts a connection; gives up after two minutes, or if `over` is set."""
    deadline = time.monotonic() + _TUNNEL_SECONDS
    while not over.is_set() and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", local), 1):
            terminal.say(text)
            return
        over.wait(0.2)
