"""The command `tpu-train check`."""

import contextlib
import json
import sys
from dataclasses import asdict

import click

from training.errors import Exit


@click.command()
@click.option("--module", metavar="FILE:FUNCTION", required=True, help="A function that returns your torch.nn.Module.")
@click.option(
    "--inputs",
    metavar="FILE:FUNCTION",
    required=True,
    help="A function that returns its batches, on the CPU: dicts, tuples or tensors.",
)
@click.option("--steps", type=click.IntRange(min=2), default=4, show_default=True, help="Number of steps to run.")
@click.option(
    "--shapes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of different shapes that its batches may have.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(module: str, inputs: str, steps: int, shapes: int, as_json: bool) -> None:
    """Run a few steps of your PyTorch module on the CPU, and report what would be slow on XLA devices, with its line.

    \b
    tpu-train check --module my_model.py:build --inputs my_model.py:batches

    It finds data-dependent shapes, branches on tensors' values, and steps that compile again. Exits with 0 if there are
    none, else with 1.
    """
    from training.lint.steps import check_user_module

    with contextlib.redirect_stdout(sys.stderr):  # standard output is for findings, not for what the user's code prints
        findings = check_user_module(module, inputs, steps, shapes)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            click.echo(str(finding))
        click.echo(f"{steps} steps: {len(findings)} finding(s)" if findings else f"{steps} steps: clean")
    if findings:
        sys.exit(Exit.FAILED)
