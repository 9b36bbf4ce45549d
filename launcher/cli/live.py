"""Commands on live hosts: `exec`, `explain`, `notebook`, `profile`, `top` on a run; `ssh` and `tunnel` beside it."""

import contextlib
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable

import click

from launcher import shell
from launcher.cli import terminal
from launcher.cli.options import PORT, Function, configured, machine, open_provider, run_context, run_option
from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.gcloud import explain_error
from launcher.run import execution
from launcher.tpu_vm import commands, slice_hints
from launcher.tpu_vm.host_scripts import EXECUTION_MARK, render

_ANSWER_SECONDS = 30  # for the answer to `profile`, after the trainer's own time-out
_DAYS = 7 * 24 * 3600.0
_TUNNEL_SECONDS = 120.0

_host_option = click.option("--host", type=click.IntRange(0), default=0, help="The host, by worker index.")
_local_port_option = click.option(
    "--local-port", type=PORT, help="Here, on 127.0.0.1.  [default: the same, or a free one]"
)


def _parse_host(_context: click.Context, _option: click.Parameter, value: str) -> int | None:
    """Returns a worker index, which the slice may lack; None for `all`. Raises click.BadParameter for other texts."""
    if value != "all" and not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a worker index nor `all`")
    return None if value == "all" else int(value)


def _hosts_option(default: str) -> Callable[[Function], Function]:
    """Returns the decorator that adds --host, a worker index or `all`, which becomes None."""
    text = "This host, by worker index."
    return click.option("--host", metavar="N|ALL", callback=_parse_host, default=default, help=text)


def _timeout_option(most: int, help: str) -> Callable[[Function], Function]:
    """Returns the decorator that adds --timeout, 1 to `most` (default: 600), with this help: the argument `seconds`."""
    seconds = click.IntRange(1, most)
    return click.option("--timeout", "seconds", type=seconds, default=600, metavar="SECONDS", help=help)


@click.command("exec", context_settings={"ignore_unknown_options": True})
@run_option
@_hosts_option("all")
@_timeout_option(7 * 24 * 3600, "After which the command is ended.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@configured
def exec_(config: Config, run_id: str | None, host: int | None, seconds: int, command: tuple[str, ...]) -> None:
    """Run a command in the live container of every host, or of one; it has no standard input. Values of secrets are
    masked in its output.

    Each line has its host in front. The exit code is 0, or that of the host that failed first. Ctrl-C ends the
    command on its hosts; the run goes on.

    \b
    tpu-launch exec -f run.yaml -- nproc
    tpu-launch exec -f run.yaml --host 0 -- sh -c 'df -h; free -g'
    """
    if not command:
        raise BadInput("exec: no command: `tpu-launch exec -f run.yaml -- COMMAND`")
    try:
        reports = execution.execute(config, run_context(), run_id, command, host=host, seconds=seconds)
    except KeyboardInterrupt:
        terminal.say("interrupted: the command is ended on its hosts; the run goes on")
        raise
    for report in reports:
        if report.exit_code is None:
            terminal.error(f"host {report.worker}: {shlex.join(command)[:200]}: {report.problem}")
        elif report.exit_code:
            terminal.say(f"host {report.worker}: exit code {report.exit_code}")
    sys.exit(execution.exit_code(reports))


@click.command()
@run_option
@_host_option
@click.option("--port", type=PORT, default=8888, help="On the host; the next free one.")
@_local_port_option
@configured
def notebook(config: Config, run_id: str | None, host: int, port: int, local_port: int | None) -> None:
    """Start Jupyter, which the image must have, in the live container of a host, and print its address with the token.
    Ctrl-C ends it; the run goes on. Fails if Jupyter ends by itself, and for slices reached by gcloud alone
    (run.transport: gcloud, slice.iap)."""
    with execution.live_session(config, run_context(), run_id) as session:
        session.choose_workers(host)
        terminal.say(f"run {session.ledger.run_id}: starting Jupyter on host {host}")
        jupyter = execution.start_jupyter(session, host, port)
        local = find_port(local_port, jupyter.port)
        text = f"http://127.0.0.1:{local}/?token={jupyter.token} is Jupyter on host {host}; Ctrl-C ends it"
        at_end = jupyter.ended.add_done_callback
        try:
            open_tunnel(session.config, host, jupyter.port, local, text, on_start=lambda end: at_end(lambda _: end()))
        except LaunchError:
            if jupyter.ended.done():
                raise LaunchError(f"Jupyter on host {host} has ended") from None
            raise
        terminal.say("Jupyter is ended; the run goes on")


@click.command()
@run_option
@click.option("--steps", type=click.IntRange(1, 1000), default=5, help="How many.")
@_hosts_option("0")
@_timeout_option(24 * 3600, "How long to wait for the steps.")
@configured
def profile(config: Config, run_id: str | None, steps: int, host: int | None, seconds: int) -> None:
    """Profile the next steps of a run that trains with `tpu-train`, on one host or on all, and wait for the result; the
    training goes on.

    The profile is written to `profiles/` in the run's folder. TensorBoard shows a copy of it, with the plugin of the
    package `xprof`.
    """
    name = time.strftime("%Y_%m_%d_%H_%M_%S")
    command = ("tpu-train", "profile", f"--steps={steps}", f"--name={name}", f"--seconds={seconds}")
    limit = seconds + _ANSWER_SECONDS
    reports = execution.execute(config, run_context(), run_id, command, host=host, seconds=limit)
    for report in reports:
        if report.exit_code is None:
            terminal.error(f"host {report.worker}: {report.problem}")
    code = execution.exit_code(reports)
    if code == 0:
        terminal.say(
            f"look at it: `gcloud storage cp -r FOLDER .`, FOLDER being the path above up to profiles/{name}, then "
            f"`tensorboard --logdir {name}`"
        )
    sys.exit(code)


@click.command()
@run_option
@configured
def explain(config: Config, run_id: str | None) -> None:
    """Say where every host of the live run is, and which one differs. Takes stacks twice, 5 s apart, and keeps them in
    the run's folder here; masks the secrets whose values are known here, on GKE none. The run goes on.

    \b
    tpu-launch explain -f run.yaml
    """
    with execution.live_session(config, run_context(), run_id) as session:
        found, folder = execution.explain_run(session)
        if found is None:
            raise LaunchError("no host gave stack traces: see how the hosts are with `tpu-launch status`")
        terminal.show(found)
        terminal.say(f"the stack traces of all hosts are in {folder}")


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--every", "seconds", type=click.FloatRange(1.0, 3600.0), default=5.0, metavar="SECONDS", help="Between two looks."
)
@click.option(
    "--columns", type=click.IntRange(40, 1000), help="Of the frame.  [default: those of the terminal, 80 without one]"
)
@configured
def top(config: Config, once: bool, seconds: float, columns: int | None) -> None:
    """Watch the slice's newest run: step, loss curve, examples/s, data wait, hosts with their memory, cost so far.
    Ctrl-C ends it; the run goes on. Shows an error and looks again; with --once, fails."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from launcher.run.status import Top, render

    def width() -> int:
        return columns or shutil.get_terminal_size((80, 24)).columns

    with contextlib.closing(open_provider(config)) as provider:
        view = Top(config, run_context(), provider)
        if once:
            for line in render(view.look(), width()):
                terminal.show(line)
            return
        console = Console(highlight=False)
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                try:
                    frame = render(view.look(), width(), console.height if console.is_terminal else None)
                except LaunchError as error:  # the next look may succeed
                    frame = str(error).splitlines()
                live.update(Text(terminal.printable("\n".join(frame)), no_wrap=True, overflow="crop"), refresh=True)
                machine().clock.sleep(seconds)


def _check_host(config: Config, host: int) -> None:
    """Raises BadInput for a host that the slice, as the candidate last seen, does not have."""
    placed = slice_hints.in_current_place(config)
    if host >= placed.accelerator.hosts:
        raise BadInput(
            f"--host {host}: a {placed.slice.accelerator_type} has hosts 0 to {placed.accelerator.hosts - 1}"
        )


@click.command(context_settings={"ignore_unknown_options": True})
@_host_option
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
@_host_option
@click.option("--port", type=PORT, required=True, help="On the host: 6006 for TensorBoard, 8888 for Jupyter.")
@_local_port_option
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
