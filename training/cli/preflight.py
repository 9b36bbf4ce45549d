"""The command `tpu-train preflight`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from training.cli import EndAtOnce, set_option
from training.errors import BadInput, Exit

if TYPE_CHECKING:
    from training.accelerators import Accelerator
    from training.yaml_file import Document


@click.command()
@click.argument("config")
@click.option(
    "--accelerator",
    "accelerators",
    metavar="TYPE,...",
    help="v3-8,v4-32,...  [default: the file's slice.accelerator_type]",
)
@click.option(
    "--max-batch",
    is_flag=True,
    help="Also search for the largest training batch that fits, with about six more compilations.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@set_option
@click.option("--vocabulary", type=click.IntRange(min=8), help="Number of ids, if there is no tokenizer yet.")
@click.option(
    "--sequence-length",
    "lengths",
    metavar="N,...",
    help="Tokens a row (for classification: of each bucket), if there is no data yet.",
)
@click.option("--labels", type=click.IntRange(min=2), help="Number of labels for classification, if there is no data.")
def preflight(
    config: str,
    accelerators: str | None,
    max_batch: bool,
    as_json: bool,
    overrides: tuple[str, ...],
    vocabulary: int | None,
    lengths: str | None,
    labels: int | None,
) -> None:
    """Compile the step of CONFIG with the TPU compiler, for slices that need not exist, and report its memory and work.

    Exit codes: 0 everything fits, 2 bad configuration or no compiler here, 3 a program does not fit, or a step is not a
    single program.

    \b
    tpu-train preflight run.yaml --accelerator v3-8,v4-32 --max-batch
    """
    from training.config import from_document
    from training.preflight.programs import assume_facts, read_facts
    from training.preflight.report import format_report
    from training.preflight.search import run_preflight
    from training.yaml_file import load

    document = load(config, overrides)
    settings, targets = from_document(document), _parse_targets(document, accelerators)
    _take_libtpu_flags(document)
    if vocabulary is not None and lengths is not None:
        facts = assume_facts(settings, vocabulary, _parse_lengths(lengths), labels)
    elif vocabulary is None and lengths is None:
        facts = read_facts(settings)
    else:
        raise BadInput("--vocabulary and --sequence-length stand in for missing data: give both or neither")

    def show(line: str) -> None:
        click.echo(f"preflight: {line}", err=True)

    report = run_preflight(settings, facts, targets, search_batch=max_batch, show=show)
    click.echo(json.dumps(report.as_json()) if as_json else "\n".join(format_report(report)))
    raise EndAtOnce(Exit.FINISHED if report.fits else Exit.DOES_NOT_FIT)


def _take_libtpu_flags(document: Document) -> None:
    """Sets this process's LIBTPU_INIT_ARGS to the run's, if run.environment has it; else leaves it as it is."""
    from training.distributed.cluster import LIBTPU_FLAGS

    run = document.value.get("run")
    variables = run.get("environment") if isinstance(run, dict) else None
    if isinstance(variables, dict) and LIBTPU_FLAGS in variables:
        os.environ[LIBTPU_FLAGS] = str(variables[LIBTPU_FLAGS])


def _parse_targets(document: Document, names: str | None) -> list[Accelerator]:
    """Returns each accelerator in --accelerator, else the file's, once. Raises BadInput for none or an unknown one."""
    from training.accelerators import UnknownAccelerator, accelerator
    from training.config import accelerator_name

    given = names.split(",") if names else [accelerator_name(document) or ""]
    wanted = [name.strip() for name in given if name.strip()]
    if not wanted:
        raise BadInput(
            "no accelerator: give --accelerator, for example --accelerator v4-8, or slice.accelerator_type in the file"
        )
    try:
        return [accelerator(name) for name in dict.fromkeys(wanted)]
    except UnknownAccelerator as error:
        raise BadInput(str(error)) from None


def _parse_lengths(text: str) -> tuple[int, ...]:
    """Returns the numbers of "32,64,128", ascending, each once. Raises BadInput for other text or a number below 2."""
    try:
        lengths = tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        lengths = ()
    if not lengths or lengths[0] < 2:
        raise BadInput(f"--sequence-length {text}: expected numbers, for example 128 or 32,64,128")
    return lengths
