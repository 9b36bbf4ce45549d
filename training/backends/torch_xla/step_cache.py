"""Caches compiled steps and runs them without tracing again.

In: the state's buffers, a step's inputs, and the seed of the framework's generator. Out: the step's report; the state's
buffers are replaced by what the step made of them.

The first four batches of a shape are traced, and each runs the program of its own trace. If all are the same program of
the same arguments, nothing but state, inputs and seed changes from step to step: from the fifth batch on the compiled
program is started with those, by position, and no operation is recorded. The tensors of the network are then stale:
`State` holds the newest buffers beside them.

Falls back to tracing every step, with a warning that says why, when these traces differ: something varies that is
neither state nor input; and when a trace after the first changes a value of Python in the network, a count of its calls
for instance, on which a later trace may depend. Batches 8, 64, 512 and so on are traced too, and the newest one again
before the state is saved (`verify`): if one of these differs, the run ends, and nothing is saved.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch_xla
from torch import Tensor

from training.backends.torch.step import StepInputs, Trace
from training.backends.torch_xla import internals
from training.backends.torch_xla.state import State
from training.errors import TrainError

FIRST_TRACED = 4  # batches of a shape
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of a batch's arrays, by name
Copy = Callable[[Tensor], Tensor]  # to the host
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, Mapping, CellType, MethodType, partial)


@dataclass(frozen=True, eq=False)
class Step:
    """A step to run. Steps of the same shapes must be the same function of state, inputs and seed."""

    shapes: Shapes
    inputs: StepInputs[Tensor]  # on the devices
    seed: int | None  # of the framework's generator in this step; None when the step draws nothing
    trace: Trace


class StepCache:
    """The compiled programs of one kind of step, one for each shape of the batch."""

    def __init__(
        self, kind: str, state: State, compare: Callable[[Shapes, Callable[[], Sequence[Tensor]]], None],
        say: Callable[[str], None], warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        """
        Args:
            kind: "training", which changes the state, or "evaluation".
            state: the state that the steps read and change.
            compare: called with a traced step's shapes, and a function that returns its outputs, before it runs.
            say: called with a line when a shape is traced for the first time.
            warn: called with a line when steps can't be cached.
        """
        self._kind, self._state, self._compare, self._say, self._warn = kind, state, compare, say, warn
        self._changes = kind == "training"
        self._programs: dict[Shapes, _CompiledStep] = {}  # of each shape's newest trace
        self._batches: dict[Shapes, int] = {}  # how many of each shape
        self._repeats = True  # as far as the first traces of each shape tell
        self._unchecked: Step | None = None  # the newest step, unless it was traced

    def run(self, step: Step) -> Tensor:
        """Starts a step and returns its report, which may not have been computed yet. Traces and compiles the first
        batches of a shape, and some later ones. If one of the first differs, warns, and traces every step from then on;
        raises TrainError if a later one does."""
        number = self._batches[step.shapes] = self._batches.get(step.shapes, 0) + 1
        is_power_of_8 = number.bit_count() == 1 and number.bit_length() % 3 == 1
        if self._repeats and number > FIRST_TRACED and not is_power_of_8:
            self._unchecked, program = step, self._programs[step.shapes]
            return self._start(program, program.arguments(self._state.values(), step.inputs.leaves(), step.seed))
        if self._repeats and number == 1:
            self._say(f"tracing the {self._kind} step for {_describe(step.shapes)}")
        before = self._begin_trace(step)
        with self._state.recording(changes=self._changes):
            report = step.trace(step.inputs)
        program, arguments = self._compile(step, before, report)
        if self._repeats:
            self._remember(step.shapes, program, number)
        report = self._start(program, arguments)
        self._state.buffers()  # drops the recorded operations
        return report

    def verify(self) -> None:
        """Traces the newest step that ran untraced again, without running it; does nothing if there was none since the
        last call. Call it before the state is saved. Raises TrainError if it is another step than the one that ran."""
        step = self._unchecked
        if step is None:
            return
        before = self._begin_trace(step)
        with self._state.recording(changes=self._changes):
            report = step.trace(step.inputs)
        program, arguments = self._compile(step, before, report)
        self._require_same(step.shapes, program)
        self._unchecked = None
        unchanged = [arguments[program.places.index(place)] for place in program.changed]
        for argument in unchanged:
            internals.donate(argument, donates=False)
        self._state.replace(program.changed, unchanged)
        self._state.buffers()  # drops the recorded operations

    def _begin_trace(self, step: Step) -> _Before:
        """Waits until the state's programs have started, and returns what `_compile` needs of the time before the step
        is recorded."""
        buffers = list(self._state.buffers().values())
        internals.wait_for_starts(buffers)
        handles = internals.handles([*buffers, *step.inputs.leaves()])
        return _Before(buffers, handles, read_plain_values(self._state.network, self._state.optimizer))

    def _compile(self, step: Step, before: _Before, report: Tensor) -> tuple[_CompiledStep, list[Tensor]]:
        """Compiles the recorded step that returned `report`, without running it, so that it overwrites the buffers it
        changes: a caller that does not start it takes back their donation. Returns it with the arguments to start it
        with this time. Warns of a program that preflight did not compile."""
        state, buffers, handles = self._state, before.buffers, before.handles
        places = {handle: place for place, handle in enumerate(handles)}
        named = dict(zip(handles, buffers, strict=False))
        self._compare(
            step.shapes, lambda: [*internals.order_outputs(named if self._changes else {}, report).values(), report]
        )
        is_new = zip(named.items(), internals.uncomputed(buffers), strict=True)
        made = internals.order_outputs({handle: value for (handle, value), new in is_new if new}, report)
        outputs = [*made.values(), report]
        arguments = internals.arguments_of(outputs)
        read = internals.handles(arguments)
        constants = {handle: value for handle, value in zip(read, arguments, strict=True) if handle not in places}
        for handle, argument in zip(read, arguments, strict=True):
            if handle in made:
                internals.donate(argument)
        numbered = places | {handle: len(handles) + number for number, handle in enumerate(constants)}
        seeds = (number for number, value in enumerate(constants.values()) if self._is_seed(value, step.seed))
        seed_at = next(seeds, None)
        program = _CompiledStep(
            internals.compile_program(outputs),
            tuple(numbered[handle] for handle in read),
            tuple(places[handle] for handle in made),
            tuple(constants.values()),
            seed_at,
            _describe_change(before.values, read_plain_values(state.network, state.optimizer)),
        )
        return program, arguments

    def _is_seed(self, argument: Tensor, seed: int | None) -> bool:
        """Returns whether an argument is, by type and value, the generator's seed: torch_xla does not mark it. Waits
        for the value of one of that type."""
        if seed is None or argument.dtype != torch.int64 or argument.ndim:
            return False
        return int(self._state.to_host(argument)) == seed

    def _start(self, program: _CompiledStep, arguments: Sequence[Tensor]) -> Tensor:
        """Starts a program, makes its results the newest state, and returns its report without waiting for it. Waits
        first, if the program changes the state, until a running snapshot has copied that."""
        if program.changed:
            self._state.wait_before_mutation()
        *values, report = internals.start_program(program.hash, arguments)
        self._state.replace(program.changed, values)
        return report

    def _remember(self, shapes: Shapes, program: _CompiledStep, number: int) -> None:
        """Keeps a shape's newest program, of batch `number`. If it differs from the former, ends all caching with a
        warning, or raises TrainError when batches have run without being traced."""
        if number > FIRST_TRACED:
            self._require_same(shapes, program)
        former = self._programs.setdefault(shapes, program)
        if difference := program.difference(former, self._state.to_host):
            self._repeats = False
            self._warn(
                f"the {self._kind} step for {_describe(shapes)} can't be cached, because traced again {difference}: "
                "every step is traced, which costs the host as long as the first ones"
            )
        self._programs[shapes] = program

    def _require_same(self, shapes: Shapes, program: _CompiledStep) -> None:
        """Raises TrainError if `program`, a new trace of the step for these shapes, differs from the kept program,
        which has run without being traced."""
        if difference := program.difference(self._programs[shapes], self._state.to_host):
            raise TrainError(
                f"the {self._kind} step for {_describe(shapes)} has changed since it was compiled: traced again after "
                f"{self._batches[shapes]} batches {difference}. Batches since the last save may have run the old "
                "program, so they are not saved: keep what changes in a parameter, not in a value of Python, or change "
                f"it within the first {FIRST_TRACED} batches, after which every step is traced"
            )


@dataclass(frozen=True, eq=False)
class _Before:
    """The state before a step is recorded."""

    buffers: list[Tensor]
    handles: list[int]  # of the buffers, then of the step's inputs
    values: list[Any]  # of Python in network and optimizer, by `read_plain_values`


@dataclass(frozen=True, eq=False)
class _CompiledStep:
    """A compiled step. Its arguments are given by their places in one list: the state's buffers, the inputs, and the
    constants (scalars and tables that tracing has put on the device, and the seed if the network draws from the
    generator)."""

    hash: bytes  # of torch_xla's graph, donated arguments included
    places: tuple[int, ...]  # of the arguments, in the program's order
    changed: tuple[int, ...]  # which buffers of the state are its outputs, before its report
    constants: tuple[Tensor, ...]
    seed_at: int | None  # which of the constants is the seed
    python_change: str | None  # of a value in the network or the optimizer, by the trace

    def arguments(self, state: Sequence[Tensor], inputs: Sequence[Tensor], seed: int | None) -> Sequence[Tensor]:
        """Returns the program's arguments in its order. Sets the device generator's seed if the program reads it."""
        constants = list(self.constants)
        if self.seed_at is not None:
            constants[self.seed_at] = internals.seed_tensor(seed, torch_xla.device())
        values = [*state, *inputs, *constants]
        return [values[place] for place in self.places]

    def difference(self, other: _CompiledStep, copy: Copy) -> str | None:
        """Returns why two traces of a step are different functions of state, inputs and seed, or that this one, if not
        the shape's first, changed a value of Python; None otherwise. `other`: the former."""
        if self.python_change and other is not self:  # the first trace may keep what it has computed
            return f"it changes a value of Python in the model {self.python_change}"
        if (self.places, self.changed, self.seed_at) != (other.places, other.changed, other.seed_at):
            return "its arguments are others"
        if self.hash != other.hash:
            return "it is another program"
        for number, (value, former) in enumerate(zip(self.constants, other.constants, strict=True)):
            same = number == self.seed_at or internals.handles([value]) == internals.handles([former])
            if not same and not torch.equal(copy(value), copy(former)):
                return f"a value of shape {list(value.shape)} in it is another, which comes from no input"
        return None


def _describe(shapes: Shapes) -> str:
    """Returns shapes as text, such as "ids [2, 128], labels [2]"."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes)


def read_plain_values(*roots: object) -> list[Any]:
    """Returns the numbers, texts and None that are reachable from objects through attributes, containers, closures and
    the places of iterators, in an order that repeats. Leaves out tensors, sets, generators, classes and globals."""
    found: list[Any] = []
    seen: dict[int, object] = {}  # keeps what was made on the way, so that its id stays its own
    left: list[Any] = list(roots)
    while left:
        value = left.pop()
        if isinstance(value, _PLAIN):
            found.append(value)
        elif id(value) not in seen and not isinstance(value, (Tensor, type, ModuleType)):
            seen[id(value)] = value
            left += getattr(value, "__dict__", {}).values()
            if isinstance(value, FunctionType):
                left += value.__closure__ or ()
            elif isinstance(value, Iterator):
                with suppress(TypeError, ValueError):  # a generator's place can't be read
                    left += value.__reduce__()[1:]
            elif isinstance(value, _CONTAINERS):
                left += value if isinstance(value, Mapping) else ()  # referents lack keys that are texts
                left += gc.get_referents(value)
    return found


def _describe_change(former: Sequence[Any], values: Sequence[Any]) -> str | None:
    """Returns how a value of `read_plain_values` has changed since it was `former`, or None."""
    pairs = zip_longest(former, values, fillvalue="nothing")
    return next((f"from {old!r} to {new!r}" for old, new in pairs if old is not new and old != new), None)
