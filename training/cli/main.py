"""`tpu-train`: what runs in the container. Every error becomes one message and an exit code (training/errors.py).

Commands parse, call and print; they hold no logic. A command is imported when it is used, and imports what it needs
when it is called, so that `--help` is quick.
"""

import contextlib
import faulthandler
import sys
import time

import click

from training.cli import EndAtOnce
from training.cli.train import print_error
from training.errors import Exit, TrainError
from training.lazy_command import LazyCommand
from training.machine import exit_at_once

_BEGAN = time.monotonic()  # approximately when the process began
_COMMANDS = [
    LazyCommand("check", "training.cli.preflight:check", "Run a few steps on the CPU and report what XLA is slow at."),
    LazyCommand("check-devices", "training.cli.train:check_devices", "Try the devices of all hosts of the slice."),
    LazyCommand("checkpoint", "training.cli.results:checkpoint", "Look at the checkpoints of a run, and verify them."),
    LazyCommand("dataset", "training.cli.data:dataset", "Look at a dataset, and check it."),
    LazyCommand("evaluate", "training.cli.train:evaluate", "Evaluate a checkpoint or a model folder."),
    LazyCommand("exec", "training.cli.train:exec_script", "Run a PyTorch program of your own on every host."),
    LazyCommand("export", "training.cli.results:export", "Write a run's model in Hugging Face's layout."),
    LazyCommand("predict", "training.cli.results:predict", "Fill the mask in a text, or name its class."),
    LazyCommand(
        "preflight", "training.cli.preflight:preflight", "Compile the step for a TPU that is not there: does it fit?"
    ),
    LazyCommand("profile", "training.cli.train:profile", "Profile some steps of the trainer beside it."),
    LazyCommand("push", "training.cli.results:push", "Push a run's model to the Hugging Face Hub."),
    LazyCommand("report", "training.cli.results:report", "Write report.html of a run."),
    LazyCommand("shards", "training.cli.data:shards", "Make a dataset of TFRecord shards."),
    LazyCommand("tokenizer", "training.cli.data:tokenizer", "Make a tokenizer from text."),
    LazyCommand("train", "training.cli.train:train", "Train, going on from the run's newest checkpoint."),
]


@click.group(commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def tpu_train() -> None:
    """Trains Transformers on every host of a Cloud TPU slice."""


def main() -> None:
    """Runs the command line. Prints a known error in one message and exits with its code (2 for a wrong option, 130
    after Ctrl-C); other errors pass. A crash of native code prints the stacks."""
    faulthandler.enable()
    try:
        tpu_train(prog_name="tpu-train", standalone_mode=False, obj=_BEGAN)
    except EndAtOnce as ended:
        exit_at_once(ended.code)
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            error.show()
        exit_at_once(Exit.BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except TrainError as error:
        print_error(error)
        exit_at_once(error.exit_code)
