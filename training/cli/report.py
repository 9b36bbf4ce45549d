"""`tpu-train report`."""

from __future__ import annotations

import click


@click.command()
@click.argument("run")
@click.option("--out", help="Another file than report.html in the run's folder.")
def report(run: str, out: str | None) -> None:
    """Write report.html from what is in RUN, a run's folder: finished, stopped or failed."""
    from training.telemetry.html import write_report

    click.echo(write_report(run, out))
