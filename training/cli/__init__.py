"""The commands of `tpu-train`, and the options that several of them take."""

from functools import partial

import click

option = partial(click.option, show_default=True)
set_option = option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the file, for example train.steps=100.",
)
step_option = option("--step", type=int, help="Step of the checkpoint.  [default: the newest]")


class EndAtOnce(SystemExit):
    """Ends the process without Python's clean-up, in which threads of a framework may crash."""

    code: int
