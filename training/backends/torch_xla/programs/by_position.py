"""When a step is traced, and when its program is run by position.

The first two batches of a shape are traced, and each runs the program that its own trace has given. Where both traces
are the same program of the same arguments, what changes from step to step is known: the state, the step's inputs and
the seed. From the third batch on the program is started with them, and no operation is recorded again. Where the traces
differ, something varies that can't be fed: every step is traced, as torch_xla does it, and a warning says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch_xla
from torch import Tensor

from training.backends.torch_xla.programs.executable import Executable, trace_and_run
from training.backends.torch_xla.state import State

Shapes = Sequence[tuple[str, tuple[int, ...]]]  # of a batch's arrays, by their names


class StepPrograms:
    """The programs of one kind of step, one for each shape of the batch."""

    def __init__(self, kind: str, state: State, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """
        Args:
            kind: "training" or "evaluation", for messages.
            state: what the steps read and change.
            say: gets a line when a shape is traced for the first time.
            warn: gets a line when a step can't be run by position.
        """
        self._kind, self._state, self._say, self._warn = kind, state, say, warn
        self._traced: dict[Shapes, Executable] = {}  # once
        self._ready: dict[Shapes, Executable] = {}
        self._is_repeatable = True  # as far as two traces of each shape tell
        self._syncs = False

    def trace_always(self) -> None:
        """From here on every step is traced, and run by `torch_xla.sync`: for whoever looks at its operations."""
        self._syncs = True

    def run(
        self, shapes: Shapes, inputs: Mapping[str, Tensor], seed: int | None, trace: Callable[[], Tensor]
    ) -> Tensor:
        """Starts a step, which changes the state. Returns its report.

        Args:
            shapes: of the batch. Steps of the same shapes are the same function of state, inputs and seed.
            inputs: on the devices, always in the same order.
            seed: of the framework's generator in this step; None when it draws nothing.
            trace: records the step, and returns its report.
        """
        if self._syncs:
            return self._sync(trace)
        values, tensors = self._state.values(), list(inputs.values())
        executable = self._ready.get(shapes) if self._is_repeatable else None
        if executable is None:
            return self._trace(shapes, tensors, seed, trace)
        if executable.changed:
            self._state.wait_before_mutation()
        *changed, report = executable.run(values, tensors, seed)
        self._state.advance(executable.changed, changed)
        return report

    def _sync(self, trace: Callable[[], Tensor]) -> Tensor:
        self._state.buffers()  # with their present values
        report = trace()
        self._state.wait_before_mutation()
        torch_xla.sync()
        return report

    def _trace(self, shapes: Shapes, inputs: list[Tensor], seed: int | None, trace: Callable[[], Tensor]) -> Tensor:
        former = self._traced.get(shapes)
        if former is None and self._is_repeatable:
            self._say(f"tracing the {self._kind} step for {_describe(shapes)}")
        state = self._state
        tensors = list(state.buffers().values())

        def before_run(changes_state: bool) -> None:
            if changes_state:
                state.wait_before_mutation()

        executable, (*changed, report) = trace_and_run(tensors, inputs, seed, trace, state.to_host, before_run)
        state.advance(executable.changed, changed)
        state.buffers()  # nothing is left of the operations that were recorded
        if not self._is_repeatable:
            return report
        if former is None:
            self._traced[shapes] = executable
            return report
        difference = executable.difference(former, state.to_host)
        if difference is None:
            self._ready[shapes] = executable
        else:
            self._is_repeatable = False
            self._warn(
                f"the {self._kind} step for {_describe(shapes)} can't be run by position, because traced a second time "
                f"{difference}: every step is traced, which costs the host as long as the first ones"
            )
        return report


def _describe(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes)
