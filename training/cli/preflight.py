"""The commands that look at a step before it runs on a TPU: preflight, check."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from training.cli import EndAtOnce, option, set_option
from training.errors import BadInput, Exit, TrainError
from training.lint import LintFinding

if TYPE_CHECKING:
    from training.accelerators import Accelerator
    from training.yaml_file import Document


@click.command()
@click.argument("config")
@option(
    "--accelerator",
    "accelerators",
    metavar="TYPE,...",
    help="v3-8,v4-32,...  [default: the file's slice.accelerator_type]",
)
@option(
    "--max-batch",
    is_flag=True,
    help="Also search for the largest training batch that fits, with about six more compilations.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@set_option
@option("--vocabulary", type=click.IntRange(min=8), help="Number of ids, if there is no tokenizer yet.")
@option(
    "--sequence-length",
    "lengths",
    metavar="N,...",
    help="Tokens a row (for classification: of each bucket), if there is no data yet.",
)
@option("--labels", type=click.IntRange(min=2), help="Number of labels for classification, if there is no data.")
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
    from training.distributed.cluster import LIBTPU_FLAGS
    from training.preflight.programs import assume_facts, read_facts
    from training.preflight.report import format_report
    from training.preflight.search import run_preflight
    from training.yaml_file import load

    document = load(config, overrides)
    settings, targets = from_document(document), _parse_targets(document, accelerators)
    run = document.value.get("run")
    variables = run.get("environment") if isinstance(run, dict) else None
    if isinstance(variables, dict) and LIBTPU_FLAGS in variables:
        os.environ[LIBTPU_FLAGS] = str(variables[LIBTPU_FLAGS])  # the run's
    if vocabulary is not None and lengths is not None:
        facts = assume_facts(settings, vocabulary, _parse_lengths(lengths), labels)
    elif vocabulary is None and lengths is None:
        facts = read_facts(settings)
    else:
        raise BadInput("--vocabulary and --sequence-length stand in for missing data: give both or neither")

    show = partial(print, "preflight:", file=sys.stderr)
    report = run_preflight(settings, facts, targets, search_batch=max_batch, show=show)
    click.echo(json.dumps(report.as_json()) if as_json else "\n".join(format_report(report)))
    raise EndAtOnce(Exit.FINISHED if report.fits else Exit.DOES_NOT_FIT)


def _parse_targets(document: Document, names: str | None) -> list[Accelerator]:
    """Returns each accelerator that `names` lists ("v3-8,v4-32"; None: the file's), once. Raises BadInput for none, or
    one that is unknown."""
    from training.accelerators import accelerator
    from training.config import accelerator_name

    given = names.split(",") if names else [accelerator_name(document) or ""]
    wanted = [name.strip() for name in given if name.strip()]
    if not wanted:
        raise BadInput(
            "no accelerator: give --accelerator, for example --accelerator v4-8, or slice.accelerator_type in the file"
        )
    return [accelerator(name) for name in dict.fromkeys(wanted)]


def _parse_lengths(text: str) -> tuple[int, ...]:
    """Returns the numbers of "32,64,128", ascending, each once. Raises BadInput for other text or a number below 2."""
    try:
        lengths = tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        lengths = ()
    if not lengths or lengths[0] < 2:
        raise BadInput(f"--sequence-length {text}: expected numbers, for example 128 or 32,64,128")
    return lengths


@click.command()
@option("--module", metavar="FILE:FUNCTION", required=True, help="A function that returns your torch.nn.Module.")
@option(
    "--inputs",
    metavar="FILE:FUNCTION",
    required=True,
    help="A function that returns its batches, on the CPU: dicts, tuples or tensors.",
)
@option("--steps", type=click.IntRange(min=2), default=4, help="Number of steps to run.")
@option("--shapes", type=click.IntRange(min=1), default=1, help="Number of different shapes that its batches may have.")
@option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(module: str, inputs: str, steps: int, shapes: int, as_json: bool) -> None:
    """Run a few steps of your PyTorch module on the CPU, and report what would be slow on XLA devices, with its line.

    \b
    tpu-train check --module my_model.py:build --inputs my_model.py:batches

    It finds data-dependent shapes, branches on tensors' values, and steps that compile again. Exits with 0 if there are
    none, else with 1.
    """
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


def check_user_module(module: str, inputs: str, steps: int, shapes: int) -> list[LintFinding]:
    """Runs `steps` training steps of a user's own PyTorch module on the CPU; returns the findings. Sets PJRT_DEVICE.
    `module` and `inputs`: FILE:FUNCTION; the functions return the module, and its batches of `shapes` different shapes
    or fewer. Raises BadInput if one does not exist, fails or exits (naming the line), or torch_xla is not installed."""
    os.environ["PJRT_DEVICE"] = "CPU"
    from training.run_setup import prepare_framework

    prepare_framework("torch-xla")
    from training.backends.torch_xla.lint import check_module

    try:
        build, batches = _load_function("--module", module), _load_function("--inputs", inputs)
        return check_module(build, batches, steps, shapes)
    except TrainError:
        raise
    except (Exception, SystemExit) as error:  # a program without a guard may end itself, and nothing was checked
        folders = tuple(f"{Path(each.rpartition(':')[0]).resolve().parent}/" for each in (module, inputs))
        frames = traceback.extract_tb(error.__traceback__)
        place = [frame for frame in frames if frame.filename.startswith(folders)] or frames
        where = f"{place[-1].filename}:{place[-1].lineno}"
        raise BadInput(f"{where}: {type(error).__name__}: {error}") from None


def _load_function(option: str, reference: str) -> Callable[[], Any]:
    """Runs the FILE of `reference`, FILE:FUNCTION, as a module, once even if it is named twice, and returns its
    FUNCTION. Puts the folder on sys.path, and the module into sys.modules in place of one of that name. The file's
    errors pass. Raises BadInput, naming `option`, if there is no such file or function."""
    file, _, name = reference.rpartition(":")
    if not file or not name:
        raise BadInput(f"{option} is {reference!r}, and must be FILE:FUNCTION, for example my_model.py:build")
    path = Path(file).resolve()
    if not path.is_file():
        raise BadInput(f"{option}: {file}: no such file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{option}: {file} is not a Python file")
    module = sys.modules.get(path.stem)
    if getattr(module, "__file__", None) != str(path):
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        raise BadInput(f"{option}: {file} has no function {name}")
    return function
