"""Loads a user's module and its batches, and checks a few steps of it, for `tpu-train check`."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from training.errors import BadInput, TrainError
from training.lint.rules import LintFinding
from training.run_setup import prepare_framework


def check_user_module(module: str, inputs: str, steps: int, shapes: int) -> list[LintFinding]:
    """Runs `steps` training steps of a user's own PyTorch module on the CPU; returns the findings. Sets PJRT_DEVICE.

    Args:
        module: FILE:FUNCTION; the function returns the module.
        inputs: FILE:FUNCTION; the function returns its batches, which may have `shapes` different shapes.

    Raises:
        BadInput: a function does not exist, its code fails, or torch_xla is not installed.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    prepare_framework("torch-xla")
    from training.backends.torch_xla.lint import check_module

    with _report_user_line(module, inputs):
        build, batches = _load_function("--module", module), _load_function("--inputs", inputs)
        return check_module(build, batches, steps, shapes)


@contextmanager
def _report_user_line(*functions: str) -> Iterator[None]:
    """Turns an exception except TrainError into BadInput with its innermost line below the folders of `functions`."""
    try:
        yield
    except TrainError:
        raise
    except Exception as error:
        folders = tuple(f"{Path(function.rpartition(':')[0]).resolve().parent}/" for function in functions)
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if frame.filename.startswith(folders)] or frames
        place = f"{user_frames[-1].filename}:{user_frames[-1].lineno}"
        raise BadInput(f"{place}: {type(error).__name__}: {error}") from None


def _load_function(option: str, reference: str) -> Callable[[], Any]:
    """Imports FILE and returns its FUNCTION. Raises BadInput, naming `option`, if either does not exist."""
    file, _, name = reference.rpartition(":")
    if not file or not name:
        raise BadInput(f"{option} is {reference!r}, and must be FILE:FUNCTION, for example my_model.py:build")
    path = Path(file).resolve()
    if not path.is_file():
        raise BadInput(f"{option}: {file}: no such file")
    function = getattr(_load_module(option, file, path), name, None)
    if not callable(function):
        raise BadInput(f"{option}: {file} has no function {name}")
    loaded: Callable[[], Any] = function
    return loaded


def _load_module(option: str, file: str, path: Path) -> ModuleType:
    """Imports a file and returns its module, with its folder on sys.path as for a script; once, even if both options
    name it. Raises BadInput, naming `option`, for a file that is not Python's."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{option}: {file} is not a Python file")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
