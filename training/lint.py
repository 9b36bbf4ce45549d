"""Finds in the traces of steps what makes them slow on XLA devices. Pure.

XLA compiles a step for fixed shapes and runs it as one program. Three things break that, and each is reported with its
line:

    data-dependent shape    an operation whose result's shape depends on values (nonzero, unique, x[mask]): it runs on
                            the host, or compiles each time
    value on the host       a branch or a loop on a tensor's value, .item(), .cpu(): the program ends there, and the
                            device waits
    another program         a later step is not the program of the first: a new shape, or a Python number that changes
                            and is compiled into the program
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

SHAPE, VALUE, PROGRAM, HOST = "data-dependent shape", "value on the host", "another program", "operation on the host"


@dataclass(frozen=True)
class TracedOperation:
    """One operation of a step: what of it determines the compiled program, and its source line."""

    name: str
    operands: str  # shapes and numbers
    place: str  # file:line


@dataclass(frozen=True)
class LintFinding:
    """A rule that a step broke."""

    rule: str
    place: str  # file:line, or "" when no line is known
    message: str

    def __str__(self) -> str:
        return f"{self.place or 'somewhere'}: {self.rule}: {self.message}"


@dataclass
class StepTrace:
    """The record of one step."""

    findings: list[LintFinding] = field(default_factory=list)
    operations: list[TracedOperation] = field(default_factory=list)
    compilations: int = 0
    transfers: int = 0  # to the host


Shapes = Mapping[str, tuple[int, ...]]
ShapeKey = tuple[tuple[str, tuple[int, ...]], ...]


class StepChecker:
    """Collects the findings of successive steps. The first step of each of `expected_shapes` shapes may compile."""

    def __init__(self, expected_shapes: int = 1) -> None:
        self._expected_shapes = expected_shapes
        self._operations: dict[ShapeKey, list[TracedOperation]] = {}  # of the newest step of each shape
        self._findings: dict[tuple[str, str], tuple[LintFinding, int]] = {}  # (rule, place) -> the first, and how many

    def add_step(self, number: int, shapes: Shapes, trace: StepTrace) -> None:
        """Adds the findings of step `number`, which ran on arrays of these shapes: those of its trace, unexplained
        transfers to the host, a new shape beyond the expected ones, another compilation for a known shape."""
        for finding in trace.findings:
            self._add(finding)
        rules = {finding.rule for finding in trace.findings}
        explained = sum(finding.rule == VALUE for finding in trace.findings)
        if trace.transfers > explained and not rules & {SHAPE, HOST}:
            self._add(LintFinding(VALUE, "", f"{trace.transfers - explained} transfer(s) to the host within a step"))
        key = tuple(sorted(shapes.items()))
        if trace.compilations and key not in self._operations and len(self._operations) >= self._expected_shapes:
            known, operations = list(self._operations.items())[-1]
            places = (new.place for _, new in _differences(operations, trace.operations) if new.place)
            change = f"step {number} has a new shape: {_shapes(shapes)}, after {_shapes(dict(known))}"
            self._add(LintFinding(PROGRAM, next(places, ""), f"{change}. Pad batches to one shape, or to a few"))
        elif trace.compilations and key in self._operations and SHAPE not in rules:
            self._add_recompilation(number, self._operations[key], trace, explained=bool(rules))
        self._operations[key] = trace.operations

    def findings(self) -> list[LintFinding]:
        """Returns the first finding of each rule and place, in the order of their steps. If there were others, its
        message ends in the number of all: "(3 times)"."""
        return [
            finding if count == 1 else LintFinding(finding.rule, finding.place, f"{finding.message} ({count} times)")
            for finding, count in self._findings.values()
        ]

    def _add(self, finding: LintFinding) -> None:
        """Keeps a finding if it is the first of its rule and place, else only counts it."""
        key = (finding.rule, finding.place)
        first, count = self._findings.get(key, (finding, 0))
        self._findings[key] = (first, count + 1)

    def _add_recompilation(
        self, number: int, earlier: Sequence[TracedOperation], trace: StepTrace, *, explained: bool
    ) -> None:
        """Adds the finding for a step that compiled although its shape is known: the first operation that differs from
        the `earlier` step's. If none does, adds the first that only the earlier step has, or one without a place; or
        nothing if `explained`: other findings say why."""
        old, new = next(_differences(earlier, trace.operations), (None, None))
        if new is not None:
            before, advice = "where nothing was before", "every step must do the same"
            if old is not None and old.name == new.name:
                before, advice = f"after {_short(old.operands)}", "numbers that change must come as tensors"
            elif old is not None:
                before = f"where {old.name} was before"
            message = f"step {number} compiled again: {new.name}{_short(new.operands)} {before}; {advice}"
            self._add(LintFinding(PROGRAM, new.place, message))
        elif not explained and (missing := earlier[len(trace.operations) :]):
            message = f"step {number} compiled again: {missing[0].name} is missing; every step must do the same"
            self._add(LintFinding(PROGRAM, missing[0].place, message))
        elif not explained:
            message = f"step {number} compiled again, though its operations were those of the step before"
            self._add(LintFinding(PROGRAM, "", message))


def _short(text: str) -> str:
    """Returns a text cut to 120 characters."""
    return text if len(text) <= 120 else f"{text[:117]}..."


def _shapes(shapes: Shapes) -> str:
    """Returns for example "ids [2, 128], labels [2]"."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def _differences(
    earlier: Sequence[TracedOperation], later: Sequence[TracedOperation]
) -> Iterator[tuple[TracedOperation | None, TracedOperation]]:
    """Yields (old, new) for each operation of the later step whose name or operands are not those at the same position
    of the earlier; old None beyond its end. Operations that only the earlier step has are left out."""
    for old, new in zip_longest(earlier, later):
        if new is not None and (old is None or (old.name, old.operands) != (new.name, new.operands)):
            yield old, new
