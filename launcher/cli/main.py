"""`tpu-launch`: the group of its commands, and how errors become messages and exit codes.

The modules of commands are imported when a command is used. They parse, call and print; decisions are made elsewhere.
Every command takes `-f FILE`, `--set key=value` and `--emulated`. An error is one message and a documented exit code
(launcher.errors.Exit).
"""

import io
import logging
import os
import signal
import stat
import sys

import click

from launcher import installation
from launcher.cli import terminal
from launcher.errors import Exit, LaunchError, from_disk
from training.errors import TrainError
from training.lazy_command import LazyCommand

COMMANDS = (  # name, where it is below launcher.cli, short help
    ("capacity", "slices:capacity", "Show the slice's candidates, and what was asked for."),
    ("completion", "init:completion", "Print the completion script for a shell."),
    ("doctor", "slices:doctor", "Check what a run needs, and show what fixes it."),
    ("down", "slices:down", "Delete the slice and wait until it is gone."),
    ("emulator", "emulator:emulator", "Start, stop and break a stand-in for Google Cloud."),
    ("estimate", "plan:estimate", "Estimate hours and dollars of the run on each candidate."),
    ("events", "run:events", "Print the events of a run, oldest first."),
    ("exec", "live:exec_", "Run a command in the live container of every host."),
    ("explain", "live:explain", "Say what each host of a live run waits for."),
    ("gc", "slices:gc", "Delete leftovers: slices that are expired, preempted or failed."),
    ("image", "plan:image", "Make the base that images without a container engine start from."),
    ("init", "init:init", "Write a first file, commented and valid."),
    ("list", "slices:list_", "List the slices that tpu-launch made, or the runs of a bucket."),
    ("local", "plan:local", "Run a command in the run's image on this machine."),
    ("logs", "run:logs", "Print the lines of all hosts, each once."),
    ("manifest", "plan:manifest", "Print the run as Kubernetes objects for GKE."),
    ("notebook", "live:notebook", "Start Jupyter in the live container of a host."),
    ("profile", "live:profile", "Profile the next steps of a run that trains."),
    ("plan", "plan:plan", "Print every command that up, run and down would use."),
    ("preflight", "plan:preflight", "Compile the step with the TPU compiler: does it fit, what does it cost?"),
    ("rehearsal", "rehearsal:rehearsal", "Rehearse a whole run on an emulated slice."),
    ("run", "run:run", "Start the container on every host and watch it; resume a run."),
    ("ssh", "live:ssh", "Open a shell on a host, or run a command there."),
    ("status", "run:status", "Show the slice, its newest run, and what each host is doing."),
    ("stop", "run:stop", "Stop the run's containers on every host."),
    ("supervise", "supervise:supervise", "Go on with unfinished runs of a bucket that nothing supervises."),
    ("top", "live:top", "Watch a run in the terminal: loss curve, hosts, memory, cost."),
    ("tunnel", "live:tunnel", "Make a port of a host reachable on this machine."),
    ("up", "slices:up", "Create the slice and wait until every host answers."),
)


def _print_version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    """Prints the version and ends the command if `wanted`, unless the shell completes words."""
    if wanted and not context.resilient_parsing:
        click.echo(f"{context.find_root().info_name}, version {installation.version()}")
        context.exit()


@click.group(
    commands=[LazyCommand(name, f"launcher.cli.{place}", text) for name, place, text in COMMANDS],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
)
@click.option("--emulated", is_flag=True, help="Use the emulated slice of this machine instead of Google Cloud.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Print every local command (gcloud, docker, ssh, kubectl) and how it ended."
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and the commit that it was built from.",
)
@click.pass_context
def cli(context: click.Context, emulated: bool, verbose: bool) -> None:
    """Train on every host of a Cloud TPU slice, from one YAML file.

    \b
    tpu-launch up   -f run.yaml        create the slice, wait until all hosts answer
    tpu-launch run  -f run.yaml        build the image, start it on every host, watch
    tpu-launch down -f run.yaml        delete the slice, wait until it is gone
    """
    context.obj = emulated
    if verbose:
        logging.getLogger("launcher").setLevel(logging.DEBUG)
        logging.getLogger("launcher").addHandler(terminal.SayRecords())


def main() -> None:
    """Runs the command line and exits. Turns every expected error into one message and its exit code; SIGTERM, and
    SIGHUP unless it is ignored (nohup), into Ctrl-C, which ends with Exit.DETACHED; a closed pipe (`| head`) into exit
    code 0. Any other error is a traceback."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's: a host's words must not end the watch of a run
    try:
        sys.exit(cli(standalone_mode=False))
    except (click.exceptions.Abort, KeyboardInterrupt):
        _end(Exit.DETACHED)
    except click.ClickException as error:
        _end(Exit.BAD_INPUT, error.format_message())
    except LaunchError as error:
        _end(error.exit_code, str(error))
    except TrainError as error:
        _end(Exit.BAD_INPUT if error.exit_code == 2 else Exit.CLOUD_ERROR, str(error))
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): write nothing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _end(Exit.OK)
    except OSError as error:
        if (trouble := from_disk(error)) is None:
            raise
        _end(trouble.exit_code, str(trouble))


def _interrupt(number: int, _frame: object) -> None:
    """Raises KeyboardInterrupt for SIGTERM and the first SIGHUP; after a SIGHUP writes nothing to the terminal."""
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # shells repeat it
        for stream in (sys.stdout, sys.stderr):
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):  # the terminal is gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise KeyboardInterrupt


def _end(code: Exit, message: str | None = None) -> None:
    """Prints an error message, if any, and exits at once (os._exit): threads that wait for a host must not delay it."""
    if message is not None:
        terminal.error(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
