"""The TPU compiler (libtpu) on a machine without a TPU: from a traced program to an executable's facts, or the
compiler's refusal.

The only file with private interfaces: torch_xla's `_XLAC`, jaxlib's compile-only client and MLIR bindings. `require`
refuses versions that they were not seen to work with, because other versions answer with crashes. Nothing is executed
here, and no executable leaves: what a TPU would load is not verified.

A program is one StableHLO module, for all devices and partitioned by the compiler (SPMD), or for each device
(replicated). Two ways lead to one:

    program(outputs, state)     from torch_xla tensors whose values were not computed yet
    Program(stablehlo, ...)     from text, for example TensorFlow's
    `experimental_get_compiler_ir(...)(stage="stablehlo")`

and `compile(program, accelerator("v4-32"))` leads on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from training.accelerators import Accelerator
from training.errors import BadInput, Exit, TrainError
from training.preflight.hlo import BACKWARD

# What the private interfaces below were seen to work with; the image has these. jaxlib's version is jax's.
SEEN_WITH = {"jax": "0.7.1", "jaxlib": "0.7.1", "libtpu": "0.0.21"}
SEEN_WITH_TORCH = {"torch_xla": "2.9.0"}

# libtpu asks the metadata server of a TPU VM for these, unless it is told.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}

# Near the end of the memory it computes much again, in deep recursions: with the stacks that its threads have by
# default it crashed each time (SIGSEGV, "stack overflow") on bert-base with 328 rows of 512 tokens for v6e, with 64 MiB
# twice in a dozen such programs.
_DEEP_STACKS = "--xla_internal_thread_stack_size_bytes=268435456"

_LOADING = threading.Lock()  # libtpu is loaded once, whichever thread comes first


class NoCompiler(BadInput):
    """libtpu or what drives it is missing here, or is of a version that this file was not seen to work with."""


class Refused(Exception):
    """The compiler does not compile this program; the message is its own. `training.preflight.report` puts it in plain
    words."""


@dataclass(frozen=True)
class Program:
    """What is to be compiled: a module in StableHLO's text form, whose arguments may be annotated with
    `mhlo.sharding`."""

    stablehlo: str
    donated: frozenset[int] = frozenset()  # arguments whose buffers the outputs may reuse, as on the device
    arguments: Mapping[int, str] = field(
        default_factory=dict
    )  # names of arguments that have one: "model/bert.embeddings..."
    hash: str = ""  # of the computation alone, without names, layouts and places in source code
    replicated: bool = (
        False  # every device runs it as it is, on its own rows; otherwise the compiler makes the devices' parts of it
    )


@dataclass(frozen=True)
class Compiled:
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
        """What is in HBM while the program runs, with donated buffers counted once."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes + self.code_bytes


def require(needed: Mapping[str, str] = SEEN_WITH) -> None:
    """Raises NoCompiler, which says what is missing or of another version."""
    wrong = []
    for name, version in needed.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed ({version} is needed)")
            continue
        if found != version:
            wrong.append(f"{name} is {found}, and this was seen to work with {version} only")
    if wrong:
        raise NoCompiler(
            f"preflight needs the TPU compiler: {'; '.join(wrong)}. The images of tpu-launch have it: `tpu-launch preflight` runs there; "
            "a Dockerfile of your own can install " + " ".join(f"{name}=={version}" for name, version in needed.items())
        )


def version() -> str:
    """Names the compiler, for caches: the same program may compile differently with another one."""
    return "libtpu " + importlib.metadata.version("libtpu")


# --- from torch_xla


def tensor_ids(state: Mapping[str, Any]) -> dict[int, str]:
    """Number -> name of tensors that are on the device. Take it before the program is built: in-place changes give
    tensors other numbers."""
    import _XLAC

    return {_XLAC._xla_get_tensor_id(value): name for name, value in state.items()}


def stand_in_for(devices: int) -> None:
    """From here on, torch_xla traces programs for so many devices in this process, which has one CPU device: each
    array's first part is all that is ever kept of it. The programs are those of a process that has the devices, but
    can't be run here."""
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
    torch_xla.runtime.global_runtime_device_count = lambda: devices


@contextmanager
def named_operations(network: Any) -> Iterator[None]:
    """Operations that are traced in this block remember which module of the network asked for them; those of the
    backward pass, whose gradient they belong to. It is written into the program as metadata, and changes nothing
    else."""
    import _XLAC
    from torch.nn.modules import module as modules

    names = {id(module): name for name, module in network.named_modules()}
    scopes: list[Any] = []
    seen: list[Any] = []  # nodes of the backward graph, alive so that their ids stay theirs
    backward: list[Any] = []  # the scope of the gradient under way

    def enter(module: Any, _arguments: Any) -> None:
        scopes.append(_XLAC.profiler.scope_pusher(names.get(id(module), type(module).__name__)))

    def leave(module: Any, _arguments: Any, outputs: Any) -> None:
        scopes.pop()
        node = getattr(outputs, "grad_fn", None)
        if node is None or any(node is each for each in seen[-8:]):  # an outer module's result is the inner one's
            return
        seen.append(node)

        def begin(_gradients: Any) -> None:
            backward.clear()
            backward.append(_XLAC.profiler.scope_pusher(BACKWARD + names.get(id(module), "")))

        node.register_prehook(begin)

    before = _XLAC._get_ir_debug()
    _XLAC._set_ir_debug(True)
    hooks = [
        modules.register_module_forward_pre_hook(enter),
        modules.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        backward.clear()
        for hook in hooks:
            hook.remove()
        _XLAC._set_ir_debug(before)


class DataDependent(TrainError):
    """The step reads a value of a tensor while it is being built, or has a shape that depends on one: it would be
    several programs, and new ones whenever the value changes."""

    exit_code = Exit.DOES_NOT_FIT


@contextmanager
def one_program() -> Iterator[None]:
    """Raises DataDependent in this block as soon as an operation is asked for whose shape or result in Python depends
    on data."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    refused = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

    def depends(function: Any, arguments: Any) -> bool:
        if not refused & set(function.tags):
            return False
        if function is torch.ops.aten.index.Tensor:  # with a mask; with numbers its shape is known
            return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in arguments[1])
        return any(isinstance(each, torch.Tensor) and each.device.type == "xla" for each in arguments)

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if depends(function, arguments):
                raise DataDependent(
                    f"{function} depends on the values of a tensor, not on its shape alone: a TPU would stop there every step, and compile again "
                    f"whenever the values give another shape{_asked_by()}; use torch.where or a mask of a fixed shape instead"
                )
            return function(*arguments, **(options or {}))

    with Watch():
        yield


def _asked_by() -> str:
    """The place in the model's code, outside torch."""
    for frame in reversed(traceback.extract_stack()):
        if "site-packages/torch" not in frame.filename and frame.filename != __file__:
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""


def program(outputs: Sequence[Any], state: Mapping[int, str]) -> Program:
    """The program that a `torch_xla.sync()` would run to compute these tensors; it is not run. `state`: of
    `tensor_ids`, which the program may overwrite.

    Raises NoCompiler."""
    require({**SEEN_WITH, **SEEN_WITH_TORCH})
    import _XLAC
    from jaxlib import xla_client

    outputs = list(outputs)
    ids, _ = _XLAC._get_tensors_xla_device_data_node(outputs)  # in the order of the arguments
    arguments = {number: state[found] for number, found in enumerate(ids) if found in state}
    computation = xla_client.XlaComputation(_XLAC._get_xla_tensors_hlo_proto(outputs))
    text: str = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    return Program(text, frozenset(arguments), arguments, hash_of(outputs))


def hash_of(outputs: Sequence[Any]) -> str:
    """Of the program that a `torch_xla.sync()` would run for these tensors. Needs torch_xla alone."""
    import _XLAC

    return graph_hash(_XLAC._get_xla_tensors_hlo(list(outputs)))


def graph_hash(hlo: str) -> str:
    """Of a module in HLO's text form. Blind to what the same computation may differ in between devices and machines:
    layouts, names, source places."""
    for pattern in (r", metadata=\{[^{}]*\}", r"(?<=\])\{[\d,]*\}", r", entry_computation_layout=\{.*\}(?=\n|,)"):
        hlo = re.sub(pattern, "", hlo)
    return hashlib.sha256(hlo.encode()).hexdigest()[:16]


# --- to the compiler


def compile(program: Program, target: Accelerator) -> Compiled:
    """Compiles for all devices of a slice. Raises NoCompiler, and Refused with the compiler's own words."""
    require()
    with _LOADING:
        client, devices = _topology(target)
    import numpy as np
    from jax._src.interpreters import mlir
    from jaxlib import _jax, xla_client

    options = xla_client.CompileOptions()
    replicas, partitions = (len(devices), 1) if program.replicated else (1, len(devices))
    options.num_replicas, options.num_partitions = replicas, partitions
    build = options.executable_build_options
    build.num_replicas, build.num_partitions, build.use_spmd_partitioning = replicas, partitions, not program.replicated
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(devices)).reshape(replicas, partitions))
    with mlir.make_ir_context():
        module = mlir.module_to_bytecode(_with_donors(program))
    began = time.monotonic()
    try:
        executable = client.compile(module, _jax.DeviceList(devices), options)
    except (xla_client.XlaRuntimeError, ValueError) as error:
        raise Refused(str(error)) from None
    seconds = time.monotonic() - began
    memory, costs = executable.get_compiled_memory_stats(), executable.cost_analysis()
    return Compiled(
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


@lru_cache(maxsize=8)
def _topology(target: Accelerator) -> tuple[Any, tuple[Any, ...]]:
    """The compile-only client, and the devices of the slice as PJRT shows them on its TPU VMs."""
    os.environ.update(_NO_TPU)
    if _DEEP_STACKS not in (given := os.environ.get("LIBTPU_INIT_ARGS", "")):
        os.environ["LIBTPU_INIT_ARGS"] = f"{_DEEP_STACKS} {given}".strip()
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
    except Exception as error:  # jax passes on what libtpu says in several classes
        raise NoCompiler(
            f"libtpu knows no topology {generation.name}:{target.topology_name}: {str(error).splitlines()[0]}"
        ) from None
    assert len(devices) == target.devices, (
        f"{target.name}: libtpu shows {len(devices)} devices, and the table says {target.devices}"
    )
    return devices[0].client, devices


def _with_donors(program: Program) -> Any:
    """The parsed module, its donated arguments marked as such."""
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
    if program.donated:
        main = next(each for each in module.body.operations if each.attributes["sym_name"].value == "main")
        annotated = "arg_attrs" in main.attributes
        bare = [ir.DictAttr.get({})] * len(main.attributes["function_type"].value.inputs)  # TensorFlow's
        attributes = [
            ir.DictAttr.get(
                {
                    **{each.name: each.attr for each in have},
                    **({"jax.buffer_donor": ir.BoolAttr.get(True)} if number in program.donated else {}),
                }
            )
            for number, have in enumerate(main.attributes["arg_attrs"] if annotated else bare)
        ]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    return module
