"""Compares the programs of a run with those that preflight compiled, each before it first runs.

`tpu-launch run` passes the hashes of the checked programs to the containers, in one environment variable. An unchecked
program is a warning, not an error, because it may fit too. Imports nothing but the standard library, because the
launcher imports the variable's name from here.
"""

from collections.abc import Callable, Mapping, Sequence

# Environment variable of the containers: hashes of the programs that preflight compiled, separated by commas.
CHECKED_PROGRAMS_VARIABLE = "TPU_LAUNCH_PREFLIGHT"


class CheckedPrograms:
    """Compares programs with those that preflight compiled, and collects the results."""

    def __init__(self, environment: Mapping[str, str], *, comparable: bool, warn: Callable[[str], None]) -> None:
        """`environment`: has the hashes of the checked programs; `comparable`: this process runs programs for all
        devices of a slice, as preflight compiles them; `warn`: called with a line for each unchecked program."""
        hashes = environment.get(CHECKED_PROGRAMS_VARIABLE, "").split(",")
        self._checked = frozenset(program_hash for program_hash in hashes if program_hash)
        self._comparable, self._warn = comparable, warn
        self._run: dict[tuple[object, ...], str] = {}  # (kind, shape...) -> hash

    def compare(self, kind: str, shapes: Sequence[tuple[int, ...]], hash_program: Callable[[], str]) -> None:
        """Compares a program, once for its kind and shapes, with those of preflight; warns if it is none of them.
        Does nothing without a preflight or in a process that is not `comparable`. `kind` is "training" or "evaluation";
        `hash_program` takes time, and is called only for a comparison."""
        if not self._checked or not self._comparable or (kind, *shapes) in self._run:
            return
        program_hash = self._run[kind, *shapes] = hash_program()
        if program_hash not in self._checked:
            arrays, known = ", ".join(str(list(shape)) for shape in shapes), ", ".join(sorted(self._checked))
            self._warn(
                f"the {kind} program for arrays {arrays} is {program_hash}, which is none that preflight compiled "
                f"({known}): whether it fits was not checked; `tpu-launch preflight` checks it"
            )

    def summary(self) -> str | None:
        """Returns the result in a few words; None if no preflight preceded the run."""
        if not self._checked:
            return None
        if not self._comparable:
            return "not compared: this backend or machine does not run programs for a whole slice"
        others = [program_hash for program_hash in self._run.values() if program_hash not in self._checked]
        if others:
            return f"{len(others)} of {len(self._run)} programs are not what was checked: {', '.join(others)}"
        return f"{len(self._run)} programs, all as checked"
