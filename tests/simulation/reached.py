"""Finds the simulated runs that call a function: a change of that function can't affect any other run.

A call is put before the function's first statement (`mark`), the marked source is imported instead of the file
(`import_instead`), and runs are simulated (`record`).
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_MARK = "_reached"


def mark(source: str, function: str) -> str:
    """Returns the source with a call before the first statement of a function ("Class.method"). Raises KeyError."""
    scope: ast.AST = ast.parse(source)
    for name in function.split("."):
        named = {each.name: each for each in ast.walk(scope) if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        scope = named[name]
    assert isinstance(scope, ast.FunctionDef), f"{function} is a class"
    lines, first = source.splitlines(keepends=True), scope.body[0]
    lines.insert(first.lineno - 1, f"{' ' * first.col_offset}{_MARK}()\n")
    return "".join(lines)


class _Finder(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a source that is given instead of its file's."""

    def __init__(self, path: Path, source: str) -> None:
        super().__init__(".".join(path.with_suffix("").parts), str(path.resolve()))
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
    """Makes later imports of a module (its file's path from the root) execute `source`. Raises ValueError after one."""
    finder = _Finder(path, source)
    if finder.name in sys.modules:
        raise ValueError(f"{path} has been imported already")
    sys.meta_path.insert(0, finder)


def record(simulate: Callable[[int], Any], seeds: Iterable[int]) -> list[int]:
    """Simulates runs. Returns the seeds whose runs reach the mark."""
    reached: list[bool] = []
    setattr(builtins, _MARK, lambda: reached.append(True))
    found = []
    for seed in seeds:
        reached.clear()
        simulate(seed)
        if reached:
            found.append(seed)
    return found
