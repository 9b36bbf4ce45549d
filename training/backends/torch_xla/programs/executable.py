"""One traced program and where each of its arguments comes from, over torch_xla's private functions.

They are those of torch_xla's bridge to torch.compile (torch_xla/_dynamo/dynamo_bridge.py, 2.9): a program is compiled
without being run, is known by its hash, and takes its arguments by position. The state that it changes is donated: its
buffers become the outputs.

A program's arguments come from four places, which are numbered as one list, the *pool*: the tensors of the state, the
inputs of the step, constants (scalars and tables that tracing has put on the device), and the seed of the framework's
generator, where the network draws from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch_xla import _XLAC


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program."""

    hash: bytes  # of torch_xla's graph, with which arguments are donated
    places: tuple[int, ...]  # of each argument in the pool
    changed: tuple[int, ...]  # which tensors of the state are its outputs, before its report
    constants: tuple[Tensor, ...]
    constant_handles: tuple[int, ...]
    has_seed: bool

    def run(self, state: Sequence[Tensor], inputs: Sequence[Tensor], seed: int | None) -> list[Tensor]:
        """Starts it. The outputs: the changed tensors of the state, and the report. The buffers of the former values
        are gone."""
        pool = [*state, *inputs, *self.constants]
        if self.has_seed:
            device = torch_xla.device()
            xm.set_rng_state(seed, device)
            pool.append(_XLAC._get_base_seed_as_tensor(str(device)))
        arguments = itemgetter(*self.places)(pool) if len(self.places) > 1 else [pool[place] for place in self.places]
        return _start(self.hash, arguments)

    def difference(self, other: Executable, copy: Callable[[Tensor], Tensor]) -> str | None:
        """Why the two traces of one step are not the same function of state, inputs and seed; None when they are.
        `copy`: to the host."""
        if self.places != other.places or self.changed != other.changed:
            return "its arguments are others"
        if self.hash != other.hash:
            return "it is another program"
        for number, (handle, former) in enumerate(zip(self.constant_handles, other.constant_handles, strict=True)):
            value = self.constants[number]
            if handle != former and not torch.equal(copy(value), copy(other.constants[number])):
                return f"a value of shape {list(value.shape)} in it is another, which comes from no input"
        return None


def trace_and_run(
    state: Sequence[Tensor],
    inputs: Sequence[Tensor],
    seed: int | None,
    trace: Callable[[], Tensor],
    copy: Callable[[Tensor], Tensor],
    before_run: Callable[[bool], None],
) -> tuple[Executable, list[Tensor]]:
    """Traces a step, compiles it unless that is done, and starts it.

    Args:
        state: on the devices, computed. They are left with operations that nobody runs: to be given new values.
        inputs: on the devices.
        seed: of the framework's generator in this step; None when the step sets none.
        trace: records the step, and returns its report.
        copy: a tensor to the host.
        before_run: called before the program starts, with whether it changes the state.

    Returns:
        The program, and what `Executable.run` returns.
    """
    xm.wait_device_ops()  # an argument that is being computed has no handle of its own yet
    pool = {handle: place for place, handle in enumerate(_XLAC._get_tensors_handle([*state, *inputs]))}
    report = trace()
    needed = _XLAC._check_tensor_need_materialization(list(state))
    changed = tuple(place for place, is_changed in enumerate(needed) if is_changed)
    outputs = [*(state[place] for place in changed), report]
    _, arguments = _XLAC._get_tensors_xla_device_data_node(outputs)  # in the order of the program's arguments
    handles = _XLAC._get_tensors_handle(arguments)
    constants: dict[int, Tensor] = {}  # by handle
    seed_handle = None
    for handle, argument in zip(handles, arguments, strict=True):
        if handle in pool:
            if pool[handle] in changed:
                _XLAC._set_buffer_donation(argument, True)
        elif seed_handle is None and seed is not None and _is_seed(argument, seed, copy):
            seed_handle = handle
        else:
            constants[handle] = argument
    first = len(state) + len(inputs)
    pool |= {handle: first + number for number, handle in enumerate(constants)}
    if seed_handle is not None:
        pool[seed_handle] = first + len(constants)
    with _donation():
        program_hash = _XLAC._get_graph_hash(outputs)
        _XLAC._xla_warm_up_cache(outputs, [])
    before_run(bool(changed))
    executable = Executable(
        program_hash,
        tuple(pool[handle] for handle in handles),
        changed,
        tuple(constants.values()),
        tuple(constants),
        seed_handle is not None,
    )
    return executable, _start(program_hash, arguments)


def _start(program_hash: bytes, arguments: Sequence[Any]) -> list[Tensor]:
    # Starting waits for the program before it with Python's lock held; this does not hold it.
    xm.wait_device_ops()
    outputs: list[Tensor] = _XLAC._run_cached_graph(program_hash, arguments)
    return outputs


def _is_seed(argument: Tensor, seed: int, copy: Callable[[Tensor], Tensor]) -> bool:
    """Whether an argument is the generator's seed: torch_xla does not mark it."""
    return argument.dtype == torch.int64 and argument.ndim == 0 and int(copy(argument)) == seed


@contextmanager
def _donation() -> Iterator[None]:
    """Programs that are compiled in this block may overwrite the arguments that are marked for it."""
    before = _XLAC._xla_get_enable_alias_with_buffer_donor_config()
    _XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
    try:
        yield
    finally:
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(before)
