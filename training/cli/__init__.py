"""The commands of `tpu-train`, and the options that several of them take."""

import click

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the file, for example train.steps=100.",
)
step_option = click.option("--step", type=int, help="Step of the checkpoint.  [default: the newest]")


class EndAtOnce(SystemExit):
    """Ends the process without Python's clean-up, in which threads of a framework may crash."""

    code: int
