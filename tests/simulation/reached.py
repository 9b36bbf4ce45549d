"""Finds the simulated runs that reach a statement: a change of that statement can't affect any other run.

A call is put before the innermost statement that covers the line (`mark`), the marked source is imported instead of the
file (`import_instead`), and runs are simulated (`record`). Statements of a module, and heads of functions, can't be
marked: a change there concerns every run.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_MARK = "_reached"
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def changed_lines(before: str, after: str) -> Iterator[int]:
    """Yields the numbers, from 1, of the lines of `before` that are changed or followed by an insertion."""
    old, new = before.splitlines(), after.splitlines()
    for kind, first, last, _, _ in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "insert":
            yield max(first, 1)
        elif kind != "equal":
            yield from range(first + 1, last + 1)


def first_line(source: str, function: str) -> int:
    """Returns the line of the first statement of a function, such as "Class.method". Raises KeyError."""
    scope: ast.AST = ast.parse(source)
    for name in function.split("."):
        named = {each.name: each for each in ast.walk(scope) if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        scope = named[name]
    assert isinstance(scope, ast.FunctionDef), f"{function} is a class"
    return scope.body[0].lineno


def place(source: str, line: int) -> int | None:
    """Returns the line of the innermost statement that covers `line`: a call before it tells that `line` is reached.
    None when the line is in no function, or in the head of one."""
    lines = source.splitlines()
    found: int | None = None
    nodes: list[ast.AST] = [ast.parse(source)]
    in_function = False
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_function = True
            if line < node.body[0].lineno:
                return None
        for child in (child for block in _BLOCKS for child in getattr(node, block, ())):
            if child.lineno <= line <= child.end_lineno:
                starts_line = not lines[child.lineno - 1][: child.col_offset].strip()
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                is_branch = lines[child.lineno - 1].lstrip().startswith(("elif ", "except", "case "))
                if in_function and starts_line and isinstance(child, ast.stmt) and not is_function and not is_branch:
                    found = child.lineno
                nodes.append(child)
    return found


def places_of(before: str, after: str) -> set[int] | None:
    """Returns the lines to mark to learn whether a change of a source is reached; None when that can't be told."""
    places = {place(before, line) for line in changed_lines(before, after)}
    return None if None in places else {line for line in places if line is not None}


def mark(source: str, places: Iterable[tuple[int, int]]) -> str:
    """Returns the source with a call before each line that reports a number; `places`: pairs of line and number."""
    lines = source.splitlines(keepends=True)
    for line, number in sorted(places, reverse=True):
        text = lines[line - 1]
        lines.insert(line - 1, f"{text[: len(text) - len(text.lstrip())]}{_MARK}({number})\n")
    return "".join(lines)


class _Finder(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a source that is given instead of its file's."""

    def __init__(self, path: Path, source: str) -> None:
        name = ".".join(path.with_suffix("").parts)
        super().__init__(name, str(path.resolve()))
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def import_instead(path: Path, source: str) -> None:
    """Makes later imports of a module, given as its file's path from the root, execute `source`. Raises ValueError when
    the module has been imported already."""
    finder = _Finder(path, source)
    if finder.name in sys.modules:
        raise ValueError(f"{path} has been imported already")
    sys.meta_path.insert(0, finder)


def record(simulate: Callable[[int], Any], seeds: Iterable[int]) -> dict[int, list[int]]:
    """Simulates runs. Returns, for each number that a mark reports, the seeds whose runs reach that mark."""
    reached: set[int] = set()
    setattr(builtins, _MARK, reached.add)
    seeds_by_number: dict[int, list[int]] = {}
    for seed in seeds:
        reached.clear()
        simulate(seed)
        for number in reached:
            seeds_by_number.setdefault(number, []).append(seed)
    return seeds_by_number
