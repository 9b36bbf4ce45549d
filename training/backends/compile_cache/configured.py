"""The compilation cache that the environment asks for.

    TPU_LAUNCH_COMPILE_CACHE       a folder on the host's disk; no cache where it is not set
    TPU_LAUNCH_COMPILE_CACHE_GB    what it may hold, in GB (4)

The launcher sets both (`run.compile_cache_gb`). Only on TPUs: the CPU clients of PyTorch/XLA and TensorFlow are no
plugins, and can't load a program that they compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from training.backends.compile_cache.pjrt import CacheCounts, install
from training.backends.compile_cache.store import ProgramStore

FOLDER_VARIABLE = "TPU_LAUNCH_COMPILE_CACHE"
GB_VARIABLE = "TPU_LAUNCH_COMPILE_CACHE_GB"
DEFAULT_GB = 4.0


def open_cache(
    environment: Mapping[str, str], library: str | None, identity: str, warn: Callable[[str], None]
) -> CacheCounts | None:
    """Puts the cache before the compiler, before the framework opens its devices.

    Args:
        environment: of the process.
        library: the plugin that the framework will load.
        identity: of what decides how a program is compiled, beside the plugin's own version.
        warn: gets a line where there can be no cache, or an entry can't be written.

    Returns:
        Its counts; None where there is no cache.
    """
    folder = environment.get(FOLDER_VARIABLE)
    if not folder or environment.get("PJRT_DEVICE") != "TPU":
        return None
    counts, problem = None, "the framework does not say where its TPU library is"
    if library:
        try:
            gigabytes = float(environment.get(GB_VARIABLE) or DEFAULT_GB)
            store = ProgramStore(Path(folder), warn, round(gigabytes * 1e9))
            counts, problem = install(Path(library), store, identity), f"{library} is of another version"
        except (OSError, ValueError, AttributeError) as error:  # AttributeError: it has no table
            problem = str(error)
    if counts is None:
        warn(f"compiled programs are not kept for the next start: {problem}")
    return counts
