"""`tpu-launch preflight`: does the training step fit, and what does it cost?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from launcher.cli import terminal
from launcher.cli.options import configured
from launcher.errors import Exit
from launcher.home import home

if TYPE_CHECKING:
    from launcher.config import Config


@click.command()
@click.option(
    "--accelerator", "accelerators", metavar="TYPE,...", default="", help="v3-8,v4-32,...  [default: the file's]"
)
@click.option(
    "--max-batch",
    is_flag=True,
    help="Also search for the largest training batch that fits: compiles about six times more.",
)
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
@click.option("--vocabulary", type=int, help="Before there is a tokenizer: how many ids it will have.")
@click.option(
    "--sequence-length", metavar="N,...", help="Before there is data: tokens a row; of each bucket, for classification."
)
@click.option("--labels", type=int, help="Before there is data, classification: how many labels.")
@configured
def preflight(
    config: Config,
    accelerators: str,
    max_batch: bool,
    as_json: bool,
    vocabulary: int | None,
    sequence_length: str | None,
    labels: int | None,
) -> None:
    """Compile the run's step with the TPU compiler, here, for slices that need not exist: does it fit, and what does it
    cost?

    \b
    tpu-launch preflight -f run.yaml
    tpu-launch preflight -f run.yaml --accelerator v3-8,v4-32 --max-batch
    """
    from launcher.checks import preflight as preflight_check

    stand_ins = {"--vocabulary": vocabulary, "--sequence-length": sequence_length, "--labels": labels}
    more = [part for flag, value in stand_ins.items() if value is not None for part in (flag, str(value))]
    names = [each.strip() for each in accelerators.split(",") if each.strip()]
    results = preflight_check.check(config, home(), names, max_batch=max_batch, more=more, say=terminal.say)
    if as_json:
        terminal.dump({"fits": all(each["fits"] for each in results), "accelerators": results})
    else:
        for line in (line for each in results for line in each["lines"]):
            click.echo(line)
    sys.exit(Exit.OK if all(each["fits"] for each in results) else Exit.DOES_NOT_FIT)
