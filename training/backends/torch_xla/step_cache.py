"""Caches compiled steps and runs them without tracing again.

In: the state's buffers, a step's inputs, and the seed of the framework's generator. Out: the step's report; the state's
buffers are replaced by what the step made of them.

The first two batches of a shape are traced, and each runs the program of its own trace. If both traces are the same
program of the same arguments, nothing but state, inputs and seed changes from step to step: from the third batch on the
compiled program is started with those, by position, and no operation is recorded. The tensors of the network are then
stale: `State` holds the newest buffers beside them.

Falls back to tracing every step, with a warning that says why, when the two traces differ: something varies that is
neither state nor input. `trace_always` asks for that from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor

from training.backends.torch_xla import internals
from training.backends.torch_xla.state import State
from training.backends.torch_xla.step import StepInputs

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of a batch's arrays, by name
Copy = Callable[[Tensor], Tensor]  # to the host


class StepCache:
    """The compiled programs of one kind of step, one for each shape of the batch."""

    def __init__(
        self, kind: str, state: State, compare: Callable[[Shapes, Tensor], None], say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        """
        Args:
            kind: "training", which changes the state, or "evaluation".
            state: the state that the steps read and change.
            compare: called with a traced step's shapes and report, before its program runs.
            say: called with a line when a shape is traced for the first time.
            warn: called with a line when steps can't be cached.
        """
        self._kind, self._state, self._compare, self._say, self._warn = kind, state, compare, say, warn
        self._traced: dict[Shapes, _CompiledStep] = {}  # once
        self._cached: dict[Shapes, _CompiledStep] = {}
        self._repeats = True  # as far as two traces of each shape tell
        self._syncs = False

    def trace_always(self) -> None:
        """Makes every further step be traced and run by `torch_xla.sync`, so that its operations can be watched."""
        self._syncs = True

    def run(
        self, batch: Mapping[str, Sequence[int]], inputs: StepInputs[Tensor], seed: int | None,
        trace: Callable[[StepInputs[Tensor]], Tensor],
    ) -> Tensor:  # fmt: skip
        """Starts a step and returns its report, which may not have been computed yet.

        Args:
            batch: shapes of the batch's arrays, by name. Steps of the same shapes must be the same function of state,
                inputs and seed.
            inputs: tensors on the devices.
            seed: of the framework's generator in this step; None when the step draws nothing.
            trace: records the operations of the step and returns its report.
        """
        shapes = tuple((name, tuple(shape)) for name, shape in batch.items())
        program = self._cached.get(shapes)
        if program and self._repeats and not self._syncs:
            if program.changed:
                self._state.wait_before_mutation()
            *values, report = program.start(self._state.values(), inputs.leaves(), seed)
            self._state.replace(program.changed, values)
            return report
        state = list(self._state.buffers().values())
        arguments = None if self._syncs else _Arguments(state, inputs.leaves(), seed)
        if shapes not in self._traced and not self._syncs and self._repeats:
            self._say(f"tracing the {self._kind} step for {_describe(shapes)}")
        with self._state.recording(changes=self._kind == "training"):
            report = trace(inputs)
        self._compare(shapes, report)
        if arguments is None:
            self._state.wait_before_mutation()
            torch_xla.sync()
            return report
        return self._compile_and_start(shapes, arguments, report)

    def _compile_and_start(self, shapes: Shapes, arguments: _Arguments, report: Tensor) -> Tensor:
        """Compiles and starts a traced step, and returns its report. Remembers the program while traces repeat."""
        program, values = _compile(arguments, report, self._state.to_host)
        if program.changed:
            self._state.wait_before_mutation()
        *values, report = internals.start_program(program.hash, values)
        self._state.replace(program.changed, values)
        self._state.buffers()  # drops the recorded operations
        if self._repeats:
            self._remember(shapes, program)
        return report

    def _remember(self, shapes: Shapes, program: _CompiledStep) -> None:
        """Keeps a shape's first program; caches the second if it is equal, else warns and ends all caching."""
        former = self._traced.setdefault(shapes, program)
        if former is program:
            return
        difference = program.difference(former, self._state.to_host)
        if difference is None:
            self._cached[shapes] = program
            return
        self._repeats = False
        self._warn(
            f"the {self._kind} step for {_describe(shapes)} can't be cached, because traced a second time {difference}:"
            " every step is traced, which costs the host as long as the first ones"
        )


class _Arguments:
    """The arguments that a step brings, before it is traced."""

    def __init__(self, state: list[Tensor], inputs: list[Tensor], seed: int | None) -> None:
        xm.wait_device_ops()  # an argument that is being computed has no handle of its own yet
        self.state, self.seed, self.count = state, seed, len(state) + len(inputs)
        self.places = {handle: place for place, handle in enumerate(internals.handles([*state, *inputs]))}


@dataclass(frozen=True, eq=False)
class _CompiledStep:
    """A compiled step. Its arguments are given by their places in one list: the state's buffers, the inputs, the
    constants (scalars and tables that tracing has put on the device), and the seed if the network draws from the
    generator."""

    hash: bytes  # of torch_xla's graph, donated arguments included
    places: tuple[int, ...]  # of the arguments, in the program's order
    changed: tuple[int, ...]  # which buffers of the state are its outputs, before its report
    constants: tuple[Tensor, ...]
    constant_handles: tuple[int, ...]
    has_seed: bool

    def start(self, state: Sequence[Tensor], inputs: Sequence[Tensor], seed: int | None) -> list[Tensor]:
        """Starts the program. Returns the changed buffers of the state, and the report."""
        values = [*state, *inputs, *self.constants]
        if self.has_seed:
            values.append(internals.seed_tensor(seed, torch_xla.device()))
        arguments = itemgetter(*self.places)(values) if len(self.places) > 1 else [values[at] for at in self.places]
        return internals.start_program(self.hash, arguments)

    def difference(self, other: _CompiledStep, copy: Copy) -> str | None:
        """Returns why two traces of a step are different functions of state, inputs and seed; None if they are not."""
        if self.places != other.places or self.changed != other.changed:
            return "its arguments are others"
        if self.hash != other.hash:
            return "it is another program"
        for number, (handle, former) in enumerate(zip(self.constant_handles, other.constant_handles, strict=True)):
            value = self.constants[number]
            if handle != former and not torch.equal(copy(value), copy(other.constants[number])):
                return f"a value of shape {list(value.shape)} in it is another, which comes from no input"
        return None


def _compile(given: _Arguments, report: Tensor, copy: Copy) -> tuple[_CompiledStep, list[Tensor]]:
    """Compiles a traced step without running it. Returns it with the arguments to start it with this time."""
    changed = tuple(place for place, is_changed in enumerate(internals.uncomputed(given.state)) if is_changed)
    outputs = [*(given.state[place] for place in changed), report]
    arguments = internals.arguments_of(outputs)
    handles = internals.handles(arguments)
    places, constants, seed_handle = dict(given.places), dict[int, Tensor](), None
    for handle, argument in zip(handles, arguments, strict=True):
        if handle in given.places:
            if given.places[handle] in changed:
                internals.donate(argument)
        elif seed_handle is None and given.seed is not None and _is_seed(argument, given.seed, copy):
            seed_handle = handle
        else:
            constants[handle] = argument
    places |= {handle: given.count + number for number, handle in enumerate(constants)}
    if seed_handle is not None:
        places[seed_handle] = given.count + len(constants)
    program = _CompiledStep(
        internals.compile_program(outputs),
        tuple(places[handle] for handle in handles),
        changed,
        tuple(constants.values()),
        tuple(constants),
        seed_handle is not None,
    )
    return program, arguments


def _is_seed(argument: Tensor, seed: int, copy: Copy) -> bool:
    # torch_xla does not mark the argument that is the generator's seed.
    return argument.dtype == torch.int64 and argument.ndim == 0 and int(copy(argument)) == seed


def _describe(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes)
