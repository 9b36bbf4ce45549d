"""The flags of libtpu and its compiler (LIBTPU_INIT_ARGS) for a run's process, by framework. Preflight compiles with
the same flags, so it compiles the executable that the run will use.

Pure. A flag that the user sets (run.environment) stays as it is.
"""

from collections.abc import Mapping

VARIABLE = "LIBTPU_INIT_ARGS"

# What torch_xla 2.9 adds when it is imported on a machine with TPU chips (_setup_libtpu_flags in
# https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/__init__.py); tests/oracle compares.
_TORCH_XLA = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
_TORCH_XLA_V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}


def parse(flags: str) -> dict[str, str]:
    """Returns name -> value of flags separated by spaces; the value of a bare flag is "true"."""
    pairs = (flag.removeprefix("--").partition("=") for flag in flags.split())
    return {name: value if equals else "true" for name, equals, value in pairs}


def torch_xla_defaults(generation: str, own: str) -> dict[str, str]:
    """Returns the flags that torch_xla adds on a `generation` such as "v5e", except those in `own`, the user's."""
    defaults = {**_TORCH_XLA, **(_TORCH_XLA_V5 if generation.startswith("v5") else {})}
    given = parse(own)
    return {name: value for name, value in defaults.items() if name not in given}


def no_defaults(generation: str, own: str) -> dict[str, str]:
    """Returns {}: TensorFlow adds no flags to the user's."""
    return {}


def join(own: str, defaults: Mapping[str, str]) -> str:
    """Returns a value for LIBTPU_INIT_ARGS: the user's flags `own`, and a flag for each of `defaults`."""
    return " ".join([*own.split(), *(f"--{name}={value}" for name, value in defaults.items())])
