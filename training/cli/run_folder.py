"""The commands of `tpu-train` for what a run left in its folder: report, and checkpoint list, show, restore, verify."""

from __future__ import annotations

import sys

import click

from training.errors import Exit

_newest = click.option("--step", type=int, help="The newest, unless given.")


@click.command()
@click.argument("run")
@click.option("--out", help="Another file than report.html in the run's folder.")
def report(run: str, out: str | None) -> None:
    """Write report.html from what is in RUN, a run's folder: finished, stopped or failed."""
    from training.telemetry.html import write_report

    click.echo(write_report(run, out))


@click.group()
def checkpoint() -> None:
    """Look at the checkpoints of a run, and verify them."""


@checkpoint.command("list")
@click.argument("folder")
def list_checkpoints(folder: str) -> None:
    """List the committed checkpoints below FOLDER, a run's folder."""
    from training.checkpoint import admin

    click.echo(admin.render_table(folder))


@checkpoint.command("show")
@click.argument("folder")
@_newest
def show_checkpoint(folder: str, step: int | None) -> None:
    """Print the manifest of a checkpoint as JSON."""
    from training.checkpoint import admin

    click.echo(admin.render_manifest(folder, step))


@checkpoint.command("restore")
@click.argument("folder")
@click.argument("new_run")
@_newest
def restore_checkpoint(folder: str, new_run: str, step: int | None) -> None:
    """Copy a checkpoint of the run's folder FOLDER to NEW_RUN, the folder of a run that has none.

    \b
    tpu-train checkpoint restore gs://b/runs/a gs://b/runs/a2 --step 4000
    tpu-train train file.yaml --run-id a2           goes on from step 4000
    """
    from training.checkpoint import admin

    click.echo(f"{new_run}: goes on from step {admin.copy_to_run(folder, new_run, step)}")


@checkpoint.command("verify")
@click.argument("folder")
@click.option("--step", type=int, help="Only this one.")
def verify_checkpoint(folder: str, step: int | None) -> None:
    """Read every byte of the checkpoints below FOLDER. Exits with 1 if one is damaged, or its state is not finite."""
    from training.checkpoint import admin

    text, good = admin.verify_checkpoints(folder, step)
    click.echo(text)
    if not good:
        sys.exit(Exit.FAILED)
