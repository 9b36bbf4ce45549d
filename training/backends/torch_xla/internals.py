"""All private names of torch_xla (2.9) that this program uses, each behind one function.

A release of torch_xla may rename or change any of them. tests/container/test_internals.py holds a test for each, which
says what breaks. Most are those of torch_xla's bridge to torch.compile (torch_xla/_dynamo/dynamo_bridge.py): a traced
program is compiled without being run, is known by its hash, and takes its arguments by position.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch_xla.core.xla_builder as xla_builder
import torch_xla.core.xla_model as xm
import torch_xla.runtime
from torch import Tensor
from torch_xla import _XLAC
from torch_xla.distributed.spmd import ShardingType

from training.models.torch.layer_scan import Step, Tensors

# --- arrays between host and devices


def local_devices() -> list[str]:
    """Returns the names of this host's devices, for example ["TPU:4", ...] on the second host of a slice. Starts the
    runtime, if it has not started."""
    return _XLAC._xla_get_runtime_devices()


def upload(tensors: Sequence[Tensor], device: Any, shardings: Sequence[Any] | None) -> list[Tensor]:
    """Copies tensors to `device` in one call; under SPMD to all devices, by an `xla_spec` for each in `shardings`."""
    return _XLAC._xla_tensors_from_aten(list(tensors), [str(device)] * len(tensors), shardings)


def placeholder(shape: Sequence[int]) -> Tensor:
    """Returns an fp32 tensor on the device that has no buffer: programs of it can be traced, and not run."""
    return xla_builder.create_placeholder_tensor(tuple(shape), torch.float32)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors to the host in one call, which torch_xla counts as one transfer."""
    return _XLAC._xla_get_cpu_tensors(list(tensors))


def local_slices(tensors: Sequence[Tensor]) -> list[list[tuple[tuple[slice, ...], Tensor]]]:
    """Copies what this host's devices hold of split tensors to the host, without a program. Returns for each tensor the
    index in the whole tensor and the copy of each device."""
    copies = _XLAC._get_local_shards(list(tensors))
    places = _XLAC._get_local_shard_replica_and_indices(list(tensors))
    return [
        [(tuple(index), copy) for (copy, _device), (_replica, index) in zip(*of_tensor, strict=True)]
        for of_tensor in zip(copies, places, strict=True)
    ]


def declare_sharding(tensor: Tensor, sharding: Any) -> None:
    """Declares how a tensor is sharded, and whatever later programs make of it in place. `spmd.mark_sharding` would do
    the same, but imports JAX, which takes seconds."""
    _XLAC._xla_mark_sharding(tensor, sharding)


def read_shardings(tensors: Sequence[Tensor]) -> list[str]:
    """Returns each tensor's sharding as XLA writes it, "{replicated}" for instance; "" without a declared one."""
    return _XLAC._get_xla_sharding_specs(list(tensors))


# --- traced programs


def handles(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a number for each tensor's buffer on the device, the same in every program that reads the buffer."""
    return _XLAC._get_tensors_handle(list(tensors))


def arguments_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors that the program of these outputs reads, in the order of its arguments."""
    _, arguments = _XLAC._get_tensors_xla_device_data_node(list(outputs))
    return list(arguments)


def order_outputs(outputs: Mapping[int, Tensor], report: Tensor) -> Mapping[int, Tensor]:
    """Returns the new values of buffers, by the `handles` of these, in the order in which their program reads the
    buffers. The compiler writes the first output of a size into the first donated buffer of that size, and so on: in
    another order it would have to copy many of them. Without SPMD, programs keep their order, and sums their bits."""
    # The parameters' order is that of the network, and once they are in order, the moments' is theirs.
    for _ in range(2 if torch_xla.runtime.is_spmd() else 0):
        read = handles(arguments_of([*outputs.values(), report]))
        outputs = {handle: outputs[handle] for handle in read if handle in outputs} | dict(outputs)
    return outputs


def uncomputed(tensors: Sequence[Tensor]) -> list[bool]:
    """Returns for each tensor whether it stands for traced operations that have not run."""
    return _XLAC._check_tensor_need_materialization(list(tensors))


def donate(argument: Tensor, *, donates: bool = True) -> None:
    """Lets programs that are compiled next overwrite this argument's buffer; forbids it unless `donates`."""
    _XLAC._set_buffer_donation(argument, donates)


def compile_program(outputs: Sequence[Tensor]) -> bytes:
    """Compiles the program of these outputs without running it, unless torch_xla has it already. Returns its hash."""
    alias = _XLAC._xla_get_enable_alias_with_buffer_donor_config, _XLAC._xla_set_enable_alias_with_buffer_donor_config
    with _switched_on(*alias):
        program_hash: bytes = _XLAC._get_graph_hash(list(outputs))
        _XLAC._xla_warm_up_cache(list(outputs), [])
    return program_hash


def wait_for_starts(tensors: Sequence[Tensor]) -> None:
    """Waits until the programs that make these tensors were handed to the devices, not for their ends: only then their
    buffers have handles. Does not hold Python's lock."""
    _XLAC._xla_sync_multi(list(tensors[:1]), [], wait=False, sync_xla_data=False)


def start_program(program_hash: bytes, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Starts a compiled program and returns its outputs. Buffers of donated arguments are gone."""
    wait_for_starts(arguments)  # starting would wait with Python's lock held
    return _XLAC._run_cached_graph(program_hash, arguments)


def seed_tensor(seed: int | None, device: Any) -> Tensor:
    """Sets the seed of the device's generator, and returns the tensor that programs read it from."""
    xm.set_rng_state(seed, device)
    return _XLAC._get_base_seed_as_tensor(str(device))


@contextmanager
def _switched_on(read: Callable[[], bool], switch: Callable[[bool], None]) -> Iterator[None]:
    """Switches a setting of torch_xla on in this block. `read`: returns the setting; `switch`: changes it."""
    before = read()
    switch(True)
    try:
        yield
    finally:
        switch(before)


def numbers_as_constants() -> AbstractContextManager[None]:
    """Returns a block in which numbers of Python that operations take are constants of the program, not arguments:
    starting a program takes as long as it has arguments."""
    return _switched_on(_XLAC._get_xla_all_numbers_special_scalars, _XLAC._set_xla_all_numbers_special_scalars)


def loop_over(step: Step, carry: Tensors, stacked: Tensors, turned: int) -> tuple[Tensors, Tensors]:
    """Traces `step`, (carry, slices) -> (carry, results), once, as the body of a loop over the first axis of `stacked`,
    of which the first `turned` are read from their ends. Returns the last carry and the results, stacked in the order
    of rounds, without gradients. What `step` reads besides is computed again in each round.

    `scan` of torch_xla.experimental would split the step by functorch, and needs torchax under SPMD."""
    from torch_xla.experimental.scan import _scan_impl_flat

    with numbers_as_constants(), _simple_counters(turned):
        last, results = _scan_impl_flat(step, carry, stacked)
    return list(last), list(results)


@contextmanager
def _simple_counters(turned: int) -> Iterator[None]:
    """Makes the counter of the scan in this block int32, and reads the first `turned` arguments from their ends. With
    torch_xla's int64, or results written from their ends as by its `reverse`, the TPU compiler does not see that a loop
    writes all of its results, and fills them with zeros first."""
    from torch_xla.experimental import scan

    cut, ends = inspect.unwrap(scan.dynamic_slice), iter([True] * turned)  # an outer scan's `read` counts its own

    @functools.wraps(cut)
    def read(values: Any, place: Any) -> Any:
        """Returns the slice of round `place`, counted from the end for the first `turned` arguments."""
        last = xla_builder.Op.scalar(place.builder(), values.shape().sizes[0] - 1, dtype=types.S32)
        return cut(values, last - place if next(ends, False) else place)

    class Builder(scan.Builder):  # type: ignore[misc]
        def add_param(self, value: Tensor) -> int:  # the counter is the first
            return int(super().add_param(value if self.num_params() else value.int()))

    types, before = scan.xb.Type, (scan.Builder, scan.dynamic_slice, scan.xb.Type.S64)
    scan.Builder, scan.dynamic_slice, types.S64 = Builder, read, types.S32
    try:
        yield
    finally:
        scan.Builder, scan.dynamic_slice, types.S64 = before


TensorFunction = Callable[[Sequence[Tensor]], list[Tensor]]


def call_lowered(function: Callable[..., Any], shapes: Sequence[Any], platform: str, name: str) -> TensorFunction:
    """Returns a JAX function, exported for `platform` and these jax.ShapeDtypeStructs, as a function of tensors.
    `call_jax` of torch_xla would lower for JAX's own devices, write a newer version of Pallas' programs than libtpu
    reads, and needs torchax."""
    import jax.export
    from jaxlib import xla_client

    jax.config.update("jax_traceback_in_locations_limit", 1)  # else the kernel holds its callers' lines: other programs
    exported = jax.export.export(jax.jit(function, keep_unused=True), platforms=[platform])(*shapes)
    module = xla_client._xla.mlir.mlir_module_to_xla_computation(
        exported.mlir_module(), use_tuple_args=False, return_tuple=True
    )
    computation = xla_builder.computation_from_module_proto(name, module.as_serialized_hlo_module_proto())

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(_XLAC._xla_user_computation(f"xla::{name}", list(tensors), computation))

    return call


def split_by_hand(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor, whose sharding is declared, that each device holds, as the compiler's own tensor:
    what is computed of it is not split any further."""
    return _XLAC._spmd_full_to_shard_shape(tensor)


def join_by_hand(part: Tensor, sharding: Any, shape: Sequence[int]) -> Tensor:
    """Returns the whole tensor of `shape` whose parts `split_by_hand`, or operations on such parts, gave; `sharding`:
    an `OpSharding`."""
    _XLAC._mark_manual_sharding(part, _XLAC.OpSharding([], [], [], ShardingType.MANUAL))
    return _XLAC._spmd_shard_to_full_shape(part, sharding, list(shape), part.dtype)


# --- programs as text, for preflight and profiles


def program_text(outputs: Sequence[Tensor]) -> str:
    """Returns the HLO of the program that would compute these outputs."""
    return _XLAC._get_xla_tensors_hlo(list(outputs))


def program_proto(outputs: Sequence[Tensor]) -> bytes:
    """Returns the program that would compute these outputs as a serialized HloModuleProto."""
    return _XLAC._get_xla_tensors_hlo_proto(list(outputs))


def push_scope(name: str) -> Any:
    """Names the operations that are traced while the returned object lives; see `operation_metadata`."""
    return _XLAC.profiler.scope_pusher(name)


def operation_metadata() -> AbstractContextManager[None]:
    """Returns a block in which programs that are traced keep the scope names of their operations."""
    return _switched_on(_XLAC._get_ir_debug, _XLAC._set_ir_debug)


def trace_event(name: str, **facts: int) -> AbstractContextManager[Any]:
    """Returns a block that a profile shows. Unlike profiler.Trace, it does not name operations: that would make the
    step another program."""
    return _XLAC.profiler.TraceMe(name, **facts)


def simulate_devices(count: int) -> None:
    """Makes torch_xla trace programs for `count` devices from here on, in a process with one CPU device. Only the first
    part of each array is ever kept: the programs are those of a process with the devices, but can't run."""
    torch_xla.runtime.use_spmd()
    torch_xla.runtime.global_runtime_device_count = lambda: count
