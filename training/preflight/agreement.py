"""Does the run execute the programs that preflight compiled? Compared once for each shape, when the program has been
traced and before it first runs.

`tpu-launch run` passes the hashes of the checked programs to the containers, in one environment variable. A program
that was not checked is a warning, not an error: it may fit too, but nobody has checked. Imports nothing but the
standard library, because the launcher imports the name of the variable from here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Environment variable of the containers: hashes of the programs that preflight compiled, separated by commas.
CHECKED_PROGRAMS_VARIABLE = "TPU_LAUNCH_PREFLIGHT"


class CheckedPrograms:
    """What was checked, and what is about to run."""

    def __init__(self, environment: Mapping[str, str], *, comparable: bool, talks: bool) -> None:
        """`comparable`: this process runs programs for all devices of a slice, as preflight compiles them. `talks`: it
        is the host that tells the user."""
        self._expected = frozenset(each for each in environment.get(CHECKED_PROGRAMS_VARIABLE, "").split(",") if each)
        self._comparable, self._talks = comparable, talks
        self._seen: dict[tuple[object, ...], str] = {}

    def look(self, kind: str, shapes: Sequence[tuple[int, ...]], outputs: Callable[[], list[Any]]) -> None:
        """Before a program of this kind, "training" or "evaluation", runs on arrays of these shapes; `outputs` gives
        its tensors."""
        if not self._expected or not self._comparable or (kind, *shapes) in self._seen:
            return
        from training.preflight.compiler import hash_of

        found = self._seen[kind, *shapes] = hash_of(outputs())
        if found not in self._expected and self._talks:
            print(
                f"tpu-train: warning: the {kind} program for arrays {', '.join(map(str, map(list, shapes)))} is {found}, which is none that preflight "
                f"compiled ({', '.join(sorted(self._expected))}): whether it fits was not checked; `tpu-launch preflight` checks it",
                file=sys.stderr,
                flush=True,
            )

    def summary(self) -> str | None:
        """A few words; None when nothing was checked before."""
        if not self._expected:
            return None
        if not self._comparable:
            return "not compared: this backend or machine does not run programs for a whole slice"
        others = [found for found in self._seen.values() if found not in self._expected]
        if others:
            return f"{len(others)} of {len(self._seen)} programs are not what was checked: {', '.join(others)}"
        return f"{len(self._seen)} programs, all as checked"
