"""Compiles programs with the TPU compiler (libtpu) on a machine without a TPU.

Uses private interfaces: jaxlib's compile-only client and MLIR bindings. `require_versions` refuses untested versions,
because they crash. Nothing is executed here, and no executable is kept: that a TPU would load it is not verified.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from training.accelerators import Accelerator, accelerator
from training.errors import BadInput, Exit, TrainError
from training.preflight.hlo import Collective, read_work

# The versions with which the private interfaces were tested: those of each image, so that preflight compiles with the
# compiler of the run. The newest with jaxlib comes first.
_TESTED = (
    # torch-xla; tensorflow, without requirements-tpu.txt
    {"jax": "0.7.1", "jaxlib": "0.7.1", "libtpu": "0.0.21", "torch_xla": "2.9.0"},
    # torch-xla with requirements-2.8.txt
    {"jax": "0.6.2", "jaxlib": "0.6.2", "libtpu": "0.0.17", "torch_xla": "2.8.0"},
    {"libtpu": "0.0.52"},  # torch-tpu, which compiles without jaxlib
)

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

_loading = threading.Lock()  # libtpu must be loaded only once


class CompilerUnavailable(BadInput):
    """libtpu or its Python interface is missing here, or has an untested version."""


class CompilationRefused(Exception):
    """The compiler does not compile this program, with the compiler's own message, which `explain_refusal` reads."""


class DataDependentProgram(TrainError):
    """A step needs a tensor's value, or a shape that depends on one, while it is traced: it is several programs."""

    exit_code = Exit.DOES_NOT_FIT


def model_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Returns " (file:line: code)" of the innermost frame outside frameworks, preflight and backends, or ""."""
    training = Path(__file__).parents[1]
    own_folders = str(training / "preflight"), str(training / "backends")
    for frame in reversed(frames):
        in_framework = re.search("site-packages/(torch|tensorflow|tf_keras)", frame.filename)
        if not in_framework and not frame.filename.startswith(own_folders):
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""


@dataclass(frozen=True)
class Program:
    """A program to compile, for all devices of a slice."""

    stablehlo: str  # one module's text, whose arguments may be annotated with `mhlo.sharding`
    donated: frozenset[int] = frozenset()  # numbers of arguments whose buffers the outputs may reuse
    arguments: Mapping[int, str] = field(default_factory=dict)  # known names by number: "model/bert.embeddings..."
    hash: str = ""  # of the computation alone, without names, layouts and source lines
    shardings: Mapping[int, str] = field(default_factory=dict)  # of arguments by number, where the text lacks them
    replicated: bool = False  # each device runs it as it is; otherwise the compiler partitions it over the devices
    compile: Callable[[Accelerator], CompiledProgram] | None = None  # instead of jaxlib's compiler, without `stablehlo`


@dataclass(frozen=True)
class Memory:
    """HBM of one device while a program runs, in bytes."""

    arguments: int
    outputs: int
    donated: int  # part of the outputs that reuses the buffers of arguments
    temporaries: int
    code: int
    resident: int = 0  # state that this program does not touch, and the run's other programs
    capacity: int = 0

    @property
    def total(self) -> int:
        """Returns the HBM in use, with donated buffers counted once."""
        return self.arguments + self.outputs - self.donated + self.temporaries + self.code + self.resident


@dataclass(frozen=True)
class CompiledProgram:
    """Facts of an executable. FLOPs and bytes are those of one device; where loops are, estimated by their cycles."""

    seconds: float  # of the compilation
    memory: Memory
    flops: float
    bytes_accessed: float
    cycles: int  # by the compiler's estimate, of all operations but collectives
    collectives: Sequence[Collective]
    module: bytes  # the optimised, scheduled program: a serialized HloModuleProto


def require_versions(*, tracing: bool = False, tested: Sequence[Mapping[str, str]] = _TESTED) -> None:
    """Raises CompilerUnavailable if a package is missing or has another version than belongs to the installed libtpu
    (to the first in `tested`, if libtpu is missing or not tested), or if TensorFlow is the wheel for TPUs. The packages
    are those of the compiler; also torch_xla if `tracing`."""

    def find_version(package: str) -> str | None:
        return next((found.version for found in importlib.metadata.distributions(name=package)), None)

    if find_version("tensorflow-tpu"):
        raise CompilerUnavailable(
            "preflight can't trace with the TensorFlow wheel for TPUs, which lowers programs on a TPU alone: use the "
            "image for CPUs, `tpu-launch preflight --set image.build_args={}`; its compiler, libtpu "
            f"{tested[0]['libtpu']}, is newer than the run's"
        )
    versions = next((each for each in tested if each["libtpu"] == find_version("libtpu")), tested[0])
    needed = {name: version for name, version in versions.items() if name != "torch_xla"}
    if tracing:
        needed["torch_xla"] = versions.get("torch_xla", tested[0]["torch_xla"])
    mistakes = []
    for name, version in needed.items():
        installed = find_version(name)
        if installed is None:
            mistakes.append(f"{name} is not installed ({version} is needed)")
        elif installed != version:
            mistakes.append(f"{name} is {installed}; only {version} was tested")
    if mistakes:
        packages = " ".join(f"{name}=={version}" for name, version in needed.items())
        raise CompilerUnavailable(
            f"preflight needs the TPU compiler: {'; '.join(mistakes)}. The images of tpu-launch have it: "
            f"`tpu-launch preflight` runs there; a Dockerfile of your own can install {packages}"
        )


def hash_hlo(hlo: str) -> str:
    """Returns a hash, 16 hex digits, of a module in HLO's text form. Ignores layouts and metadata (source lines, the
    framework's names of operations), which may differ between devices and machines for the same computation; names of
    instructions count. Ignores shardings but those of custom calls too: torch_xla derives an operation's from those of
    its arguments, and an argument's follow from the mesh."""
    for pattern in (r", metadata=\{[^{}]*\}", r"(?<=\])\{[\d,]*\}", r", entry_computation_layout=\{.*\}(?=\n|,)"):
        hlo = re.sub(pattern, "", hlo)
    hlo = re.sub(r"(?m)^(?!.* custom-call\()(.*), sharding=\{[^{}]*\}", r"\1", hlo)
    return hashlib.sha256(hlo.encode()).hexdigest()[:16]


def compile_program(
    program: Program, target: Accelerator, flags: Mapping[str, str] = MappingProxyType({})
) -> CompiledProgram:
    """Compiles a program for all devices of a slice; loads libtpu and sets its environment variables first. `flags` are
    libtpu's, by name without dashes; a program with its own `compile` does not get them. LIBTPU_INIT_ARGS apply too, to
    the whole process. Raises CompilerUnavailable if no compiler here knows the slice or versions are untested, and
    CompilationRefused if the compiler rejects the program."""
    require_versions()
    if program.compile:
        return program.compile(target)
    with _loading:
        client, devices = _topology(target.name)
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
    return gather_facts(
        executable.hlo_modules()[0].as_serialized_hlo_module_proto(),
        costs,
        Memory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            donated=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
        ),
        seconds,
    )


def gather_facts(module: bytes, costs: Mapping[str, float], memory: Memory, seconds: float) -> CompiledProgram:
    """Returns the facts of an executable: `module`, its serialized HloModuleProto, and what the compiler told of its
    costs and `memory`, after so many `seconds`."""
    work = read_work(module)
    flops, size = costs.get("flops", 0.0) * work.loops, costs.get("bytes accessed", 0.0) * work.loops
    return CompiledProgram(seconds, memory, flops, size, work.cycles, work.collectives, module)


def _compile_options(devices: int, *, replicated: bool) -> Any:
    """Returns options for one replica a device if `replicated`, else for one program partitioned over the devices."""
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


def set_environment() -> None:
    """Sets libtpu's variables in os.environ for compiling without a TPU; keeps log levels, extends LIBTPU_INIT_ARGS."""
    os.environ.update(_ENVIRONMENT_WITHOUT_TPU)
    for variable, level in _QUIET.items():
        os.environ.setdefault(variable, level)
    if DEEP_STACKS not in (given := os.environ.get("LIBTPU_INIT_ARGS", "")):
        os.environ["LIBTPU_INIT_ARGS"] = f"{DEEP_STACKS} {given}".strip()


def describe_topology(target: Accelerator) -> tuple[str, dict[str, Any]]:
    """Returns libtpu's name of a slice, and the options that make its devices those of a TPU VM."""
    options: dict[str, Any] = {}
    generation = target.generation
    if generation.devices_per_chip < generation.cores_per_chip:
        options["chip_config_name"] = "megacore"
    if target.chips_per_host != 4:
        options["chips_per_host_bounds"] = target.chips_per_host_bounds
    return f"{generation.name}:{target.topology_name}", options


@lru_cache(maxsize=8)
def _topology(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns the compile-only client and the devices of an accelerator type, as PJRT shows them on its TPU VMs. Loads
    libtpu, and sets its environment variables. Raises CompilerUnavailable if libtpu does not know the slice."""
    target = accelerator(name)
    set_environment()
    from jax.experimental import topologies

    text, options = describe_topology(target)
    try:
        devices = tuple(topologies.get_topology_desc(text, "tpu", **options).devices)
    except Exception as error:  # jax passes on libtpu's errors in several classes
        raise CompilerUnavailable(f"libtpu knows no topology {text}: {str(error).splitlines()[0]}") from None
    assert len(devices) == target.devices, (
        f"{target.name}: libtpu shows {len(devices)} devices, and the table says {target.devices}"
    )
    return devices[0].client, devices


def _with_donors(program: Program) -> Any:
    """Returns the parsed module with donors and shardings marked, and without aliases and compiler settings."""
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
    if not program.donated and not program.shardings:
        return module
    main = next(operation for operation in module.body.operations if operation.attributes["sym_name"].value == "main")
    if "arg_attrs" in main.attributes:
        annotations = main.attributes["arg_attrs"]
    else:  # TensorFlow's programs have none
        annotations = [ir.DictAttr.get({})] * len(main.attributes["function_type"].value.inputs)
    donor = {"jax.buffer_donor": ir.BoolAttr.get(True)}
    placed = {number: {"mhlo.sharding": ir.StringAttr.get(text)} for number, text in program.shardings.items()}
    attributes = [
        ir.DictAttr.get(
            placed.get(number, {})
            | {own.name: own.attr for own in annotation}
            | (donor if number in program.donated else {})
        )
        for number, annotation in enumerate(annotations)
    ]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    return module
