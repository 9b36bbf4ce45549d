"""The commands of `tpu-train` for what a run has written: report, checkpoint, export, push, predict."""

import json
import os
import sys

import click

from training.cli import option, step_option
from training.errors import Exit


@click.command()
@click.argument("run")
@option("--out", help="File to write.  [default: report.html in the run's folder]")
def report(run: str, out: str | None) -> None:
    """Write report.html of RUN, a run's folder, finished, stopped, failed or still running; print where it is."""
    from training.telemetry.report import write_report

    click.echo(write_report(run, out))


@click.group()
def checkpoint() -> None:
    """Look at the checkpoints of a run, and verify them."""


@checkpoint.command("list")
@click.argument("folder")
def list_checkpoints(folder: str) -> None:
    """List the committed checkpoints below FOLDER, a run's folder: newest first, damaged ones with the reason."""
    from training.checkpoint import admin

    click.echo(admin.render_table(folder))


@checkpoint.command("show")
@click.argument("folder")
@step_option
def show_checkpoint(folder: str, step: int | None) -> None:
    """Print the manifest of a checkpoint as JSON."""
    from training.checkpoint import admin

    click.echo(admin.render_manifest(folder, step))


@checkpoint.command("restore")
@click.argument("folder")
@click.argument("new_run")
@step_option
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
@option("--step", type=int, help="Only this one.")
def verify_checkpoint(folder: str, step: int | None) -> None:
    """Read every byte of the checkpoints below FOLDER, and print a line for each. Exits with 1 if one is damaged, or
    its state is not finite."""
    from training.checkpoint import admin

    text, good = admin.verify_checkpoints(folder, step)
    click.echo(text)
    if not good:
        sys.exit(Exit.FAILED)


@click.command()
@click.argument("run")
@click.argument("out")
@step_option
@option("--best", is_flag=True, help="Export the checkpoint with the best figure (checkpoint.best).")
def export(run: str, out: str, step: int | None, best: bool) -> None:
    """Write the model of RUN, a run's folder, to OUT in Hugging Face's layout; with LoRA only the adapter, unless
    lora.merge is set."""
    from training.checkpoint import admin
    from training.models.export import export_checkpoint

    if best and step is not None:
        raise click.UsageError("give --step or --best, not both")
    chosen = admin.best_saved_step(run) if best else step
    click.echo(f"{out}: the model after step {export_checkpoint(run, out, chosen)}")


@click.command()
@click.argument("run")
@click.argument("repository")
@step_option
@option("--private/--public", default=True, help="Visibility of a repository that it creates.")
@option("--beside", is_flag=True, hidden=True, help="Started by a run: lower its priority, and print JSON.")
def push(run: str, repository: str, step: int | None, private: bool, beside: bool) -> None:
    """Push the model of RUN, a run's folder, to REPOSITORY (org/name) on the Hugging Face Hub, with the token in
    HF_TOKEN. Creates the repository if it does not exist."""
    if beside:
        os.nice(10)
    from training.models.hub import push_model

    pushed_step, commit = push_model(run, repository, step, private)
    if beside:
        click.echo(json.dumps({"step": pushed_step, "commit": commit}))
    else:
        click.echo(f"{repository}: the model after step {pushed_step}: {commit}")


@click.command()
@click.argument("folder")
@click.argument("text")
@option("--text-pair", "pair", metavar="TEXT", help="The second text, for a model of pairs of texts.")
@option("--top", type=click.IntRange(min=1), default=5, help="Number of answers.")
def predict(folder: str, text: str, pair: str | None, top: int) -> None:
    """Fill the mask in TEXT, name its class or those of its words, or go on with it, with the model in FOLDER, one that
    `export` wrote or a name on the Hub.

    \b
    tpu-train predict runs/local/model "The [MASK] statement ends a loop."
    tpu-train predict runs/banking77/model "My card has not arrived yet."
    """
    from training.models.predict import classify, fill_mask, go_on, label_words, pipeline_of

    pipeline = pipeline_of(folder)
    if pipeline == "text-generation":
        lines = [go_on(folder, text)]
    elif pipeline == "token-classification":
        lines = [f"{part.score:.4f}  {part.name}  {part.words}" for part in label_words(folder, text)]
    elif pipeline == "text-classification":
        lines = [f"{label.score:.4f}  {label.name}" for label in classify(folder, text, top, pair)]
    else:
        lines = [f"{each.score:.4f}  {each.token!r}  {each.text}" for each in fill_mask(folder, text, top)]
    for line in lines:
        click.echo(line)
