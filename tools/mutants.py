"""Measures how many mistakes the tests find: makes mutants of the code and plays tests and simulated runs on each.

    python -m tools.mutants --side launcher                  60 mutants drawn with today's seed
    python -m tools.mutants --side trainer --seed 7 --count 20 training/checkpoint
    python -m tools.mutants --side launcher --seed 7 --only 12    one mutant again, with what the tests print
    python -m tools.mutants --side launcher --given FILE.json     mutants written by hand: [{file, old, new, sentence}]

A mutant is one slip in one function: a condition is turned, one half of an `and` is left out, a call is forgotten, a
bound moves by one. At most one is drawn from a function. Each is tried on a copy of the checkout with the simulated
runs and the unit tests that call the function. Mutants that change nothing one could see are for the reader to
recognize: survivors are printed as differences. The result is also in .tpu-launch/mutants.json.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import unified_diff
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "launcher": ("launcher/run", "launcher/tpu_vm", "launcher/gke", "launcher/gcloud"),
    "trainer": (
        "training/checkpoint", "training/distributed", "training/trainer.py", "training/data/sampling",
        "training/telemetry",
    ),
}  # fmt: skip
TESTS = {"launcher": ("tests/launcher", "tests/emulator"), "trainer": ("tests/training",)}
MOST_RUNS = 400  # of one mutant: of 53 mutants, no run after the 400th that reached one was the first to find it
MOST_TESTS = 150  # of one mutant: those that reach the fewest other functions
SECONDS = 600  # for the tests, or the simulated runs, of one mutant
_FLIPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line")
# Names who called, simulated run or test: pytest's variable reaches child processes too.
_MARKS = """import os
_seen = set()
def reached(number):
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if name and (number, name) not in _seen:
        _seen.add((number, name))
        with open({path!r}, "a", encoding="utf-8") as file:
            file.write(f"{{number}}\\t{{name}}\\n")
"""
_SIMULATE = """import os, sys
from tests.simulation.__main__ import load
simulate = load(sys.argv[1]).simulate
for seed in sys.stdin.read().split():
    os.environ["PYTEST_CURRENT_TEST"] = f"{seed} (call)"
    if broken := simulate(int(seed)).broken:
        sys.exit(f"{seed}: {broken[0][0]}")
"""
# What only says something: a mutant there is for readers of messages, not for these tests.
_WORDS = {"say", "_say", "tell", "warn", "_warn", "debug", "info", "warning", "log", "_log", "print", "explain"}


@dataclass
class Mutant:
    path: str  # from the root
    function: str  # such as "Class.method"
    line: int  # from 1
    slip: str
    source: str  # of the whole file
    runs: int = 0  # simulated ones that call the function
    tests: int = 0  # that call it
    broken: str = ""  # the seed and the promise that found it
    failed: str = ""  # the test that found it

    def difference(self) -> str:
        """Returns the changed lines."""
        sources = (ROOT / self.path).read_text(encoding="utf-8"), self.source
        lines = unified_diff(*(ast.unparse(ast.parse(source)).splitlines() for source in sources), lineterm="", n=1)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def functions_of(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions and methods of a module with their dotted names; inner functions belong to their outer."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield outer + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{outer}{node.name}.")


def slips_of(function: ast.FunctionDef) -> Iterator[tuple[int, str, str]]:
    """Yields each slip that can be made in a function: its place (an index of `ast.walk`), its kind, and its words."""
    for place, node in enumerate(ast.walk(function)):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.comprehension):
            tests = node.ifs if isinstance(node, ast.comprehension) else [node.test]
            if tests and not (isinstance(tests[0], ast.Constant) or _is_types(tests[0])):
                yield place, "turn", f"turns the condition {ast.unparse(tests[0])!r}"
        if isinstance(node, ast.BoolOp):
            yield place, "first", f"leaves {ast.unparse(node.values[0])!r} out"
            yield place, "last", f"leaves {ast.unparse(node.values[-1])!r} out"
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            yield place, "bound", f"moves the bound of {ast.unparse(node)!r} by one"
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            yield place, "bound", f"turns {ast.unparse(node)!r}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_words(node.value):
            yield place, "forget", f"forgets {ast.unparse(node)[:60]!r}"
        if isinstance(node, ast.AugAssign):
            yield place, "forget", f"forgets {ast.unparse(node)[:60]!r}"
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            yield place, "return", f"returns {not node.value.value}"
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield place, "forget", f"forgets {ast.unparse(node)[:60]!r}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and not _has_text(node):
            yield place, "sign", f"turns the sign in {ast.unparse(node)!r}"


def _is_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _has_text(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr | ast.List | ast.Tuple | ast.Set)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in ast.walk(node)
    )


def _is_words(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in _WORDS


def slip(function: ast.FunctionDef, place: int, kind: str) -> None:
    """Makes one slip in a function's syntax tree, in place."""
    node = next(each for at, each in enumerate(ast.walk(function)) if at == place)
    if kind == "turn":
        if isinstance(node, ast.comprehension):
            node.ifs[0] = ast.UnaryOp(ast.Not(), node.ifs[0])
        else:
            assert isinstance(node, ast.If | ast.While | ast.IfExp)
            node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind in ("first", "last"):
        assert isinstance(node, ast.BoolOp)
        del node.values[0 if kind == "first" else -1]
        if len(node.values) == 1:
            _replace(function, node, node.values[0])
    elif kind == "bound":
        assert isinstance(node, ast.Compare)
        node.ops[0] = _FLIPPED[type(node.ops[0])]()
    elif kind == "return":
        assert isinstance(node, ast.Return)
        assert isinstance(node.value, ast.Constant)
        node.value = ast.Constant(not node.value.value)
    elif kind == "sign":
        assert isinstance(node, ast.BinOp)
        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
    else:
        _replace(function, node, ast.Pass())


def _replace(function: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(function):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and any(each is old for each in value):
                setattr(parent, name, [new if each is old else each for each in value])


def draw(places: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draws mutants of the files in some folders, at most one from a function."""
    rng = random.Random(seed)
    files = sorted({file for place in places for file in ([Path(place)] if place.endswith(".py") else _files(place))})
    candidates = []
    for file in files:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        candidates += [(file, name, slips) for name, node in functions_of(tree) if (slips := list(slips_of(node)))]
    # A function with more slips is drawn more often: mistakes are made by the line.
    keyed = [(rng.random() ** (1 / len(slips)), rng.choice(slips), file, name) for file, name, slips in candidates]
    mutants = []
    for _, (place, kind, words), file, name in sorted(keyed, key=lambda each: -each[0])[:count]:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        function = dict(functions_of(tree))[name]
        line = next(
            getattr(node, "lineno", function.lineno) for at, node in enumerate(ast.walk(function)) if at == place
        )
        slip(function, place, kind)
        source = ast.unparse(ast.fix_missing_locations(tree))
        mutants.append(Mutant(str(file), name, line, words, source))
    return mutants


def read_given(file: Path) -> list[Mutant]:
    """Returns the mutants of a file, in which each `old` is a text that its file has once, in a function."""
    mutants = []
    for given in json.loads(file.read_text(encoding="utf-8")):
        source = (ROOT / given["file"]).read_text(encoding="utf-8")
        before, old, after = source.partition(given["old"])
        assert old, f"{given['file']} does not have {given['old']!r}"
        line = before.count("\n") + 1
        ends = [(node.lineno, node.end_lineno or 0, name) for name, node in functions_of(ast.parse(source))]
        function = next(name for first, last, name in ends if first <= line <= last)
        mutants.append(Mutant(given["file"], function, line, given["sentence"], before + given["new"] + after))
    return mutants


def _files(folder: str) -> list[Path]:
    return [each.relative_to(ROOT) for each in (ROOT / folder).rglob("*.py")]


class Copy:
    """A copy of the checkout's tracked files, in which mutants are made, and where tests run."""

    def __init__(self, folder: Path, side: str) -> None:
        self._folder, self._side = folder, side
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.split("\0"):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def reach(self, mutants: Sequence[Mutant], seeds: range) -> list[set[str]]:
        """Plays all simulated runs and unit tests once. Returns for each mutant the seeds and tests that call its
        function; those that fail without a mutant are left out, and printed."""
        marks = self._folder / "marks.txt"
        (self._folder / "mutant_marks.py").write_text(_MARKS.format(path=str(marks)), encoding="utf-8")
        for path in {mutant.path for mutant in mutants}:
            source = (ROOT / path).read_text(encoding="utf-8")
            tree = ast.parse(source)
            functions = dict(functions_of(tree))
            for number, mutant in enumerate(mutants):
                if mutant.path == path:
                    call = ast.parse(f"__import__('mutant_marks').reached({number})").body
                    functions[mutant.function].body[:0] = call
            (self._folder / path).write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
        failing, left = set(), [str(seed) for seed in seeds]
        while broken := self._simulate(left):
            name = broken.strip().splitlines()[-1].partition(":")[0]
            if name not in left:
                raise SystemExit(f"the simulated runs do not end: {broken}")
            failing.add(name)
            left = left[left.index(name) + 1 :]
        ended = self._run([*_PYTEST, *TESTS[self._side]], seconds=3600)
        failing |= {line.split()[1] for line in ended.splitlines() if line.startswith(("FAILED ", "ERROR "))}
        for name in sorted(failing):
            print(f"fails without any mutant, so it is left out: {name}", flush=True)
        reached: list[set[str]] = [set() for _ in mutants]
        for line in marks.read_text(encoding="utf-8").splitlines():
            number, name = line.split("\t", 1)
            if name not in failing:
                reached[int(number)].add(name)
        for path in {mutant.path for mutant in mutants}:
            shutil.copy2(ROOT / path, self._folder / path)
        return reached

    def try_out(self, mutant: Mutant, reached: set[str], others: Counter[str]) -> str:
        """Plays what calls the mutant's function on the mutant, and notes what found it. Returns what that printed."""
        seeds = sorted((name for name in reached if name.isdigit()), key=int)
        tests = sorted((name for name in reached if not name.isdigit()), key=lambda name: (others[name], name))
        mutant.runs, mutant.tests = len(seeds), len(tests)
        (self._folder / mutant.path).write_text(mutant.source, encoding="utf-8")
        try:
            simulated = self._simulate(seeds[:MOST_RUNS]) if seeds else ""
            tested = self._run([*_PYTEST, "-x", *tests[:MOST_TESTS]], seconds=SECONDS) if tests else ""
        finally:
            shutil.copy2(ROOT / mutant.path, self._folder / mutant.path)
        mutant.broken = simulated.strip().rpartition("\n")[2][:160]
        if failed := re.search(r"^(?:FAILED|ERROR) (\S+)|^(took over .*)", tested, re.MULTILINE):
            mutant.failed = failed[1] or failed[2]
        return simulated + tested

    def _simulate(self, seeds: Iterable[str]) -> str:
        """Simulates runs until one breaks a promise. Returns what was printed then, else ""."""
        command = [sys.executable, "-c", _SIMULATE, self._side]
        return self._run(command, seconds=SECONDS, given=" ".join(seeds))

    def _run(self, command: Sequence[str], *, seconds: int, given: str = "") -> str:
        """Returns what a command printed if it failed, else an empty string."""
        with subprocess.Popen(
            command, cwd=self._folder, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed, _ = process.communicate(given, timeout=seconds)
            except subprocess.TimeoutExpired:
                return f"took over {seconds} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # a mutant may leave processes behind
        return printed if process.returncode else ""


def report(mutants: Sequence[Mutant]) -> str:
    """Returns the differences of those that nothing found, and the table."""
    missed = [each for each in mutants if not (each.broken or each.failed)]
    lines = [f"missed: {each.path}:{each.line} {each.function}: {each.slip}\n{each.difference()}" for each in missed]
    total = len(mutants)
    for words, count in {
        "simulated runs": sum(bool(each.broken) for each in mutants),
        "unit tests": sum(bool(each.failed) for each in mutants),
        "either": total - len(missed),
    }.items():
        lines.append(f"found by {words}: {count} of {total} ({count / total:.0%})")
    return "\n\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", help="files and folders; those of the side, unless given")
    parser.add_argument("--side", choices=FOLDERS, required=True)
    parser.add_argument("--count", type=int, default=60, help="how many mutants (60)")
    parser.add_argument("--seed", type=int, default=datetime.now(UTC).toordinal(), help="the day's, unless given")
    parser.add_argument("--runs", type=int, default=1000, help="how many simulated runs (1000)")
    parser.add_argument("--given", type=Path, help="a file of mutants to try, instead of drawn ones")
    parser.add_argument("--only", type=int, help="try only the mutant with this number")
    parser.add_argument("--list", action="store_true", help="print the mutants, and try none")
    options = parser.parse_args(arguments)
    if options.given is not None:
        mutants = read_given(options.given)
    else:
        mutants = draw(options.places or FOLDERS[options.side], options.count, options.seed)
    if options.list:
        for number, mutant in enumerate(mutants):
            print(f"{number}. {mutant.path}:{mutant.line} {mutant.function}: {mutant.slip}")
        return 0
    print(f"{len(mutants)} mutants, seed {options.seed}; first all tests run once, to see what they call", flush=True)
    with tempfile.TemporaryDirectory(prefix="tpu-launch-mutants-") as folder:
        tree = Copy(Path(folder), options.side)
        first = options.seed * 1000
        reached = tree.reach(mutants, range(first, first + options.runs))
        others = Counter(name for names in reached for name in names)
        for number, (mutant, names) in enumerate(zip(mutants, reached, strict=True)):
            if options.only not in (None, number):
                continue
            began = time.monotonic()
            printed = tree.try_out(mutant, names, others)
            print(
                f"{number}. {mutant.path}:{mutant.line} {mutant.function}: {mutant.slip}: "
                f"{' and '.join(filter(None, (mutant.broken, mutant.failed))) or 'MISSED'} "
                f"({mutant.runs} runs and {mutant.tests} tests call it; {time.monotonic() - began:.0f} s)",
                flush=True,
            )
            if options.only is not None:
                print(printed)
    tried = mutants if options.only is None else [mutants[options.only]]
    print(report(tried))
    (ROOT / ".tpu-launch").mkdir(mode=0o700, exist_ok=True)
    kept = [{name: value for name, value in vars(mutant).items() if name != "source"} for mutant in tried]
    (ROOT / ".tpu-launch" / "mutants.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
