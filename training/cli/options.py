"""Options that several commands of `tpu-train` share."""

from __future__ import annotations

import click

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the file, for example train.steps=100.",
)
step_option = click.option("--step", type=int, help="Of this checkpoint; the newest, unless given.")
