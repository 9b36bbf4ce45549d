"""`tpu-launch preflight`: does the training step fit, and what does it cost?"""

from __future__ import annotations

import sys

import click

from launcher.checks import preflight as checks
from launcher.cli import terminal
from launcher.cli.options import configured
from launcher.config import Config
from launcher.errors import Exit
from launcher.home import home


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
    stand_ins = {"--vocabulary": vocabulary, "--sequence-length": sequence_length, "--labels": labels}
    more = [part for flag, value in stand_ins.items() if value is not None for part in (flag, str(value))]
    names = [name.strip() for name in accelerators.split(",") if name.strip()]
    results = checks.check(config, home(), names, max_batch=max_batch, more=more, say=terminal.say)
    if as_json:
        terminal.dump({"fits": all(result["fits"] for result in results), "accelerators": results})
    else:
        for line in (line for result in results for line in result["lines"]):
            click.echo(line)
    sys.exit(Exit.OK if all(result["fits"] for result in results) else Exit.DOES_NOT_FIT)
