"""The command `tpu-train check`."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict

import click

from training.cli import set_option
from training.errors import Exit


@click.command()
@click.argument("config", required=False)
@set_option
@click.option(
    "--module", metavar="FILE:FUNCTION", help="Instead of CONFIG: a function that returns your torch.nn.Module."
)
@click.option(
    "--inputs",
    metavar="FILE:FUNCTION",
    help="With --module: a function that returns its batches, on the CPU: dicts, tuples or tensors.",
)
@click.option("--steps", type=click.IntRange(min=2), default=4, show_default=True, help="Number of steps to run.")
@click.option(
    "--shapes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --module: number of different shapes that its batches may have.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(
    config: str | None,
    overrides: tuple[str, ...],
    module: str | None,
    inputs: str | None,
    steps: int,
    shapes: int,
    as_json: bool,
) -> None:
    """Run a few steps on the CPU with small batches, and report what would be slow on XLA devices, each with its line.

    \b
    tpu-train check run.yaml
    tpu-train check --module my_model.py:build --inputs my_model.py:batches

    It finds data-dependent shapes, branches on tensors' values, and steps that compile again. Exits with 0 if there are
    none, else with 1.
    """
    from training.config import load
    from training.lint.steps import check_configuration, check_user_module

    if (config is None) == (module is None) or (module is None) != (inputs is None):
        raise click.UsageError("give either CONFIG, or --module and --inputs")
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for findings, not for what the user's code prints
        if config is None:
            findings = check_user_module(str(module), str(inputs), steps, shapes)
        else:
            findings = check_configuration(load(config, overrides), steps)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            click.echo(str(finding))
        click.echo(f"{steps} steps: {len(findings)} finding(s)" if findings else f"{steps} steps: clean")
    if findings:
        sys.exit(Exit.FAILED)
