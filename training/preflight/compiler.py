"""The TPU compiler (libtpu) on a machine without a TPU: from a program to the facts of its executable, or to the
compiler's refusal.

It uses private interfaces: jaxlib's compile-only client and MLIR bindings, as training/backends/torch_xla/tracing.py
uses torch_xla's `_XLAC`. `require_versions` refuses versions with which they were not tried, because other versions
fail with crashes. Nothing is executed here, and no executable is kept: that a TPU would load it is not verified.

A program is one StableHLO module, for all devices and partitioned by the compiler (SPMD), or for each device
(replicated). It comes from

    tracing.extract_program(outputs, state)    torch_xla tensors whose values were not computed yet
    Program(stablehlo, ...)                    text, for example of TensorFlow's
                                               `experimental_get_compiler_ir(...)(stage="stablehlo")`

and `compile_program(program, accelerator("v4-32"))` compiles it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from training.accelerators import Accelerator
from training.errors import BadInput, Exit, TrainError

# The versions with which the private interfaces were tried; the images have these. jaxlib's version is jax's.
COMPILER_VERSIONS = {"jax": "0.7.1", "jaxlib": "0.7.1", "libtpu": "0.0.21"}
TRACING_VERSIONS = {"torch_xla": "2.9.0"}

# Unless these are set, libtpu asks the metadata server of a TPU VM for them.
_ENVIRONMENT_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second preflight in the same /tmp aborts on libtpu's lock file
}
_QUIET = {"TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}

# Where memory is nearly used up, the compiler rematerializes much, in deep recursions. With the default stacks of its
# threads it crashed each time (SIGSEGV, "stack overflow") on bert-base with 328 rows of 512 tokens for v6e; with 64 MiB
# on two of a dozen such programs.
DEEP_STACKS = "--xla_internal_thread_stack_size_bytes=268435456"

_loading = threading.Lock()  # libtpu is loaded once, by whichever thread comes first


class CompilerUnavailable(BadInput):
    """libtpu or its Python interface is missing here, or has a version with which this module was not tried."""


class CompilationRefused(Exception):
    """The compiler does not compile this program; the message is its own. `training.preflight.report` explains it."""


class DataDependentProgram(TrainError):
    """While the step is built, it reads a tensor's value or needs a shape that depends on one: it would be several
    programs, and new ones whenever the value changes."""

    exit_code = Exit.DOES_NOT_FIT


@dataclass(frozen=True)
class Program:
    """A program to compile: a module in StableHLO's text form, whose arguments may be annotated with
    `mhlo.sharding`."""

    stablehlo: str
    donated: frozenset[int] = frozenset()  # numbers of arguments whose buffers the outputs may reuse
    arguments: Mapping[int, str] = field(
        default_factory=dict
    )  # number -> name, where known: "model/bert.embeddings..."
    hash: str = ""  # of the computation alone, without names, layouts and places in source code
    replicated: bool = False  # each device runs it as it is; otherwise the compiler partitions it over the devices


@dataclass(frozen=True)
class CompiledProgram:
    """Facts of an executable. Bytes and FLOPs are those of one device."""

    seconds: float
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int  # outputs that live in donated arguments: counted in both
    code_bytes: int
    flops: float
    bytes_accessed: float
    text: str  # the optimised, scheduled HLO

    @property
    def total_bytes(self) -> int:
        """HBM in use while the program runs, donated buffers counted once."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes + self.code_bytes


def require_versions(needed: Mapping[str, str] = COMPILER_VERSIONS) -> None:
    """Checks the installed packages. Raises CompilerUnavailable, which says what is missing or of another version."""
    mistakes = []
    for name, version in needed.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            mistakes.append(f"{name} is not installed ({version} is needed)")
            continue
        if installed != version:
            mistakes.append(f"{name} is {installed}, and this was seen to work with {version} only")
    if mistakes:
        packages = " ".join(f"{name}=={version}" for name, version in needed.items())
        raise CompilerUnavailable(
            f"preflight needs the TPU compiler: {'; '.join(mistakes)}. The images of tpu-launch have it: "
            f"`tpu-launch preflight` runs there; a Dockerfile of your own can install {packages}"
        )


def compiler_version() -> str:
    """Names the compiler, for caches: another one may compile the same program differently."""
    return "libtpu " + importlib.metadata.version("libtpu")


def hash_hlo(hlo: str) -> str:
    """A hash of a module in HLO's text form, without what may differ between devices and machines for the same
    computation: layouts, names, places in source code."""
    for pattern in (r", metadata=\{[^{}]*\}", r"(?<=\])\{[\d,]*\}", r", entry_computation_layout=\{.*\}(?=\n|,)"):
        hlo = re.sub(pattern, "", hlo)
    return hashlib.sha256(hlo.encode()).hexdigest()[:16]


def compile_program(
    program: Program, target: Accelerator, flags: Mapping[str, str] = MappingProxyType({})
) -> CompiledProgram:
    """Compiles a program for all devices of a slice.

    Args:
        program: to compile.
        target: the slice.
        flags: of libtpu, by name without dashes, beside LIBTPU_INIT_ARGS, which count for the whole process.

    Raises:
        CompilerUnavailable: there is no compiler here, or it does not know the slice.
        CompilationRefused: with the compiler's own message.
    """
    require_versions()
    with _loading:
        client, devices = _topology(target)
    from jax._src.interpreters import mlir
    from jaxlib import _jax, xla_client

    options = _compile_options(len(devices), replicated=program.replicated)
    options.env_option_overrides = list(flags.items())
    with mlir.make_ir_context():
        module = mlir.module_to_bytecode(_with_donors(program))
    began = time.monotonic()
    try:
        executable = client.compile(module, _jax.DeviceList(devices), options)
    except (xla_client.XlaRuntimeError, ValueError) as error:
        raise CompilationRefused(str(error)) from None
    seconds = time.monotonic() - began
    memory, costs = executable.get_compiled_memory_stats(), executable.cost_analysis()
    return CompiledProgram(
        seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        flops=costs.get("flops", 0.0),
        bytes_accessed=costs.get("bytes accessed", 0.0),
        text=executable.hlo_modules()[0].to_string(),
    )


def _compile_options(devices: int, *, replicated: bool) -> Any:
    import numpy as np
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    replicas, partitions = (devices, 1) if replicated else (1, devices)
    options.num_replicas, options.num_partitions = replicas, partitions
    build = options.executable_build_options
    build.num_replicas, build.num_partitions, build.use_spmd_partitioning = replicas, partitions, not replicated
    if not replicated:
        build.allow_spmd_sharding_propagation_to_output = [True]  # as torch_xla compiles
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(devices).reshape(replicas, partitions))
    return options


@lru_cache(maxsize=8)
def _topology(target: Accelerator) -> tuple[Any, tuple[Any, ...]]:
    """The compile-only client, and the devices of the slice as PJRT shows them on its TPU VMs."""
    os.environ.update(_ENVIRONMENT_WITHOUT_TPU)
    for variable, level in _QUIET.items():
        os.environ.setdefault(variable, level)
    if DEEP_STACKS not in (given := os.environ.get("LIBTPU_INIT_ARGS", "")):
        os.environ["LIBTPU_INIT_ARGS"] = f"{DEEP_STACKS} {given}".strip()
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    generation = target.generation
    if generation.devices_per_chip < generation.cores_per_chip:
        options["chip_config_name"] = "megacore"
    if target.chips_per_host != 4:
        options["chips_per_host_bounds"] = target.chips_per_host_bounds
    try:
        devices = tuple(
            topologies.get_topology_desc(f"{generation.name}:{target.topology_name}", "tpu", **options).devices
        )
    except Exception as error:  # jax passes on libtpu's errors in several classes
        raise CompilerUnavailable(
            f"libtpu knows no topology {generation.name}:{target.topology_name}: {str(error).splitlines()[0]}"
        ) from None
    assert len(devices) == target.devices, (
        f"{target.name}: libtpu shows {len(devices)} devices, and the table says {target.devices}"
    )
    return devices[0].client, devices


def _with_donors(program: Program) -> Any:
    """The parsed module, with its donated arguments marked as such."""
    from jaxlib.mlir import ir

    module = ir.Module.parse(program.stablehlo)
    for name in (
        "mhlo.cross_program_prefetches",
        "mhlo.input_output_alias",
        "mhlo.is_dynamic",
        "mhlo.use_auto_spmd_partitioning",
    ):
        if name in module.operation.attributes:
            del module.operation.attributes[name]
    if not program.donated:
        return module
    main = next(operation for operation in module.body.operations if operation.attributes["sym_name"].value == "main")
    if "arg_attrs" in main.attributes:
        annotations = main.attributes["arg_attrs"]
    else:  # TensorFlow's programs have none
        annotations = [ir.DictAttr.get({})] * len(main.attributes["function_type"].value.inputs)
    donor = {"jax.buffer_donor": ir.BoolAttr.get(True)}
    attributes = [
        ir.DictAttr.get({**{own.name: own.attr for own in annotation}, **(donor if number in program.donated else {})})
        for number, annotation in enumerate(annotations)
    ]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    return module
