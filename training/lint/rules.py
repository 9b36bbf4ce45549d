"""The rules that a step must keep to be quick on XLA devices, and what is said when it breaks one. Pure: nothing here
runs a step.

XLA compiles a step for fixed shapes, and then runs it as one program. Three things break that, and each is reported
with the line that does it:

    data-dependent shape    an operation whose result's shape depends on values (nonzero, unique, x[mask]): it runs on
    the host, or compiles each time value on the host       a branch or a loop on a tensor's value, .item(), .cpu(): the
    program ends here and the device waits another program         a later step is not the program of the first: a new
    shape, or a Python number that changes and is built into the program
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

SHAPE, VALUE, PROGRAM, HOST = "data-dependent shape", "value on the host", "another program", "operation on the host"


@dataclass(frozen=True)
class Operation:
    """One operation of a step, as far as it is built into the program."""

    name: str
    operands: str  # shapes and numbers
    place: str  # file:line


@dataclass(frozen=True)
class Finding:
    rule: str
    place: str  # file:line, or "" when no line did it
    message: str

    def __str__(self) -> str:
        return f"{self.place or 'somewhere'}: {self.rule}: {self.message}"


@dataclass
class Watched:
    """What was seen of one step."""

    findings: list[Finding] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    compilations: int = 0
    transfers: int = 0  # to the host


Shapes = Mapping[str, tuple[int, ...]]
Key = tuple[tuple[str, tuple[int, ...]], ...]


class Judge:
    """Takes steps in order and says what is wrong with them. The first step of each of the `expected` shapes may
    compile."""

    def __init__(self, expected: int = 1) -> None:
        self._expected = expected
        self._known: dict[Key, list[Operation]] = {}  # of the newest step of each shape
        self._found: dict[
            tuple[str, str], tuple[Finding, int]
        ] = {}  # what was found first for a rule and place, and how often

    def see(self, number: int, shapes: Shapes, watched: Watched) -> None:
        for finding in watched.findings:
            self._add(finding)
        rules = {finding.rule for finding in watched.findings}
        told = sum(finding.rule == VALUE for finding in watched.findings)
        if watched.transfers > told and not rules & {SHAPE, HOST}:
            self._add(Finding(VALUE, "", f"{watched.transfers - told} transfer(s) to the host within a step"))
        key = tuple(sorted(shapes.items()))
        if watched.compilations and key not in self._known and len(self._known) >= self._expected:
            self._add(self._new_shape(number, shapes, watched.operations))
        elif watched.compilations and key in self._known and SHAPE not in rules:
            self._again(number, self._known[key], watched, broken=bool(rules))
        self._known[key] = watched.operations

    def findings(self) -> list[Finding]:
        return [
            finding if count == 1 else Finding(finding.rule, finding.place, f"{finding.message} ({count} times)")
            for finding, count in self._found.values()
        ]

    def _add(self, finding: Finding) -> None:
        key = (finding.rule, finding.place)
        first, count = self._found.get(key, (finding, 0))
        self._found[key] = (first, count + 1)

    def _new_shape(self, number: int, shapes: Shapes, operations: Sequence[Operation]) -> Finding:
        before, known = list(self._known.items())[-1]
        place = next((now.place for _, now in _differences(known, operations) if now.place), "")
        message = f"step {number} has a new shape: {_shapes(shapes)}, after {_shapes(dict(before))}. Pad batches to one shape, or to a few"
        return Finding(PROGRAM, place, message)

    def _again(self, number: int, known: Sequence[Operation], watched: Watched, *, broken: bool) -> None:
        """A step that compiled though its shape is known. One that is `broken` in pieces by a rule already told
        compiles pieces, and that is no news."""
        for old, now in _differences(known, watched.operations):
            same = old is not None and old.name == now.name
            was = (
                f"after {_short(old.operands)}"
                if old and same
                else f"where {old.name} was before"
                if old
                else "where nothing was before"
            )
            advice = "numbers that change must come as tensors" if same else "every step must do the same"
            self._add(
                Finding(
                    PROGRAM,
                    now.place,
                    f"step {number} compiled again: {now.name}{_short(now.operands)} {was}; {advice}",
                )
            )
            return
        if not broken:
            self._add(
                Finding(
                    PROGRAM, "", f"step {number} compiled again, though its operations were those of the step before"
                )
            )


def merged(first: Sequence[Finding], second: Sequence[Finding]) -> list[Finding]:
    """Both, and what breaks a rule in the same place once."""
    known = {(each.rule, each.place) for each in first}
    return [*first, *(each for each in second if (each.rule, each.place) not in known)]


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def _shapes(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def _differences(before: Sequence[Operation], now: Sequence[Operation]) -> Iterator[tuple[Operation | None, Operation]]:
    """Place by place where two steps differ: what was there before, and what is there now."""
    for old, new in zip_longest(before, now):
        if new is not None and (old is None or (old.name, old.operands) != (new.name, new.operands)):
            yield old, new
