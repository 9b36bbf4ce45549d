"""`tpu-train preflight`: parse, call, print."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from training.errors import BadInput, Exit


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
    help="Also search for the largest training batch that fits; compiles it about six times more.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the file, for example train.global_batch_size=512.",
)
@click.option(
    "--vocabulary", type=click.IntRange(min=8), help="Before there is a tokenizer: how many ids it will have."
)
@click.option(
    "--sequence-length",
    "lengths",
    metavar="N,...",
    help="Before there is data: tokens a row; of each bucket, for classification.",
)
@click.option("--labels", type=click.IntRange(min=2), help="Before there is data, classification: how many labels.")
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
    """Compile the step that CONFIG would train, with the TPU compiler, for slices that need not exist: does it fit, and
    what does it cost?

    Exit codes: 0 everything fits, 2 bad configuration or no compiler here, 3 a program does not fit or is no single
    program.

    \b
    tpu-train preflight run.yaml --accelerator v3-8,v4-32 --max-batch
    """
    from training.preflight import report
    from training.preflight.search import check
    from training.preflight.shapes import read_facts, stand_in
    from training.yaml_file import load

    document = load(config, overrides)
    settings, targets = _settings(document), _targets(document, accelerators)
    if (vocabulary is None) != (lengths is None):
        raise BadInput("--vocabulary and --sequence-length go together: both stand in for data that is not there yet")
    facts = (
        read_facts(settings)
        if vocabulary is None or lengths is None
        else stand_in(settings, vocabulary, _numbers(lengths), labels)
    )
    found = check(
        settings, facts, targets, max_batch=max_batch, say=lambda text: click.echo(f"preflight: {text}", err=True)
    )
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        for line in report.lines(found):
            click.echo(line)
    sys.exit(Exit.FINISHED if found.fits else Exit.DOES_NOT_FIT)


def _settings(document: Any) -> Any:
    from training.config import from_document

    return from_document(document)


def _targets(document: Any, names: str | None) -> list[Any]:
    from training.accelerators import UnknownAccelerator, accelerator

    section = document.value.get("slice")
    own = section.get("accelerator_type") if isinstance(section, dict) else None
    wanted = (
        [each.strip() for each in names.split(",") if each.strip()] if names else [own] if isinstance(own, str) else []
    )
    if not wanted:
        raise BadInput(
            "which accelerator? give --accelerator, for example --accelerator v4-8, or slice.accelerator_type in the file"
        )
    try:
        return [accelerator(each) for each in dict.fromkeys(wanted)]
    except UnknownAccelerator as error:
        raise BadInput(str(error)) from None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 2:
        raise BadInput(f"--sequence-length {text}: expected numbers, for example 128 or 32,64,128")
    return found
