"""`tpu-train`: what runs in the container. Every error becomes one message and an exit code (training/errors.py).

    tpu-train tokenizer ...                 make a tokenizer            (training/cli/data.py)
    tpu-train shards ...                    make a dataset
    tpu-train dataset show|verify|preview   look at a dataset           (training/cli/dataset.py)
    tpu-train preflight CONFIG              compile for a TPU that is not there (training/cli/preflight.py)
    tpu-train train CONFIG                  train, on every host of the slice   (training/cli/train.py)
    tpu-train evaluate MODEL -c CONFIG      figures of a checkpoint or a model folder over the evaluation set
    tpu-train export RUN OUT                write a run's model as a Hugging Face folder (training/cli/models.py)
    tpu-train push RUN REPOSITORY           the same to the Hugging Face Hub
    tpu-train predict FOLDER TEXT           fill the mask in a text, or name its class
    tpu-train exec SCRIPT ...               start a PyTorch program of the user's own (training/cli/script.py)
    tpu-train check CONFIG                  what in a step will be slow on a TPU (training/cli/lint.py)
    tpu-train check-devices                 try the devices of all hosts        (training/cli/train.py)
    tpu-train profile                       profile some steps of the trainer beside it   (training/cli/train.py)
    tpu-train report RUN                    write report.html of a run  (training/cli/run_folder.py)
    tpu-train checkpoint list|show|verify   look at a run's checkpoints
    tpu-train checkpoint restore RUN NEW    begin another run with one

Commands parse, call and print; they hold no logic. A command is imported when it is used, and imports what it needs
when it is called, so that `--help` is quick.
"""

from __future__ import annotations

import sys
import time

import click

from training.cli.host_process import print_error
from training.cli.lazy_group import LazyCommand, LazyGroup
from training.errors import Exit, TrainError

_BEGAN = time.monotonic()  # of the process, as nearly as can be known
_COMMANDS = {
    "check": LazyCommand("training.cli.lint:check", "Run a few steps on the CPU and report what XLA is slow at."),
    "check-devices": LazyCommand("training.cli.train:check_devices", "Try the devices of all hosts of the slice."),
    "checkpoint": LazyCommand(
        "training.cli.run_folder:checkpoint", "Look at the checkpoints of a run, and verify them."
    ),
    "dataset": LazyCommand("training.cli.dataset:dataset", "Look at a dataset, and check it."),
    "evaluate": LazyCommand("training.cli.train:evaluate", "Evaluate a checkpoint or a model folder."),
    "exec": LazyCommand("training.cli.script:exec_script", "Run a PyTorch program of your own on every host."),
    "export": LazyCommand("training.cli.models:export", "Write a run's model in Hugging Face's layout."),
    "predict": LazyCommand("training.cli.models:predict", "Fill the mask in a text, or name its class."),
    "preflight": LazyCommand(
        "training.cli.preflight:preflight", "Compile the step for a TPU that is not there: does it fit?"
    ),
    "profile": LazyCommand("training.cli.train:profile", "Profile some steps of the trainer beside it."),
    "push": LazyCommand("training.cli.models:push", "Push a run's model to the Hugging Face Hub."),
    "report": LazyCommand("training.cli.run_folder:report", "Write report.html of a run."),
    "shards": LazyCommand("training.cli.data:shards", "Make a dataset of TFRecord shards."),
    "tokenizer": LazyCommand("training.cli.data:tokenizer", "Make a tokenizer from text."),
    "train": LazyCommand("training.cli.train:train", "Train, going on from the run's newest checkpoint."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def tpu_train() -> None:
    """Trains Transformers on every host of a Cloud TPU slice."""


def main() -> None:
    """Entry point of `tpu-train`."""
    try:
        tpu_train(prog_name="tpu-train", standalone_mode=False, obj=_BEGAN)
    except click.ClickException as error:
        error.show()
        sys.exit(Exit.BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except TrainError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except Exception as error:
        from training.yaml_file import ConfigError  # not at the top: it takes as long as all of --help

        if not isinstance(error, ConfigError):
            raise
        print(f"tpu-train: bad configuration:\n{error}", file=sys.stderr)
        sys.exit(Exit.BAD_INPUT)
