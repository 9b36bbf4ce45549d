"""Checks structural rules that no other linter checks: check_structure.py [FOLDER...]

- a function has at most 60 lines, its docstring not counted;
- a file opens with a docstring;
- a class has a name of its own: two classes of one name mean two things;
- the whole tree stays within its line budgets (only when no folder is named).
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

LONGEST_FUNCTION = 60
PACKAGES = ("launcher", "training")
LINE_BUDGETS = {PACKAGES: 48_000, ("tests",): 42_250}  # lower the second with the tree, towards 38,000

ONE_PER_PROGRAM = {"BadInput", "Exit"}  # errors and exit codes of tpu-launch and of tpu-train
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def main(folders: list[str]) -> int:
    """Prints one line per violation; returns 1 if there is any, else 0."""
    modules = parse_files(folders or PACKAGES)
    violations = [violation for path, module in modules.items() for violation in check_file(path, module)]
    violations += check_class_names(modules)
    if not folders:
        violations += check_line_budgets()
    print(*violations, sep="\n", end="\n" if violations else "")
    return int(bool(violations))


def python_files(folders: tuple[str, ...] | list[str]) -> list[Path]:
    """Returns the Python files below the folders, sorted."""
    files = [path for folder in folders for path in Path(folder).rglob("*.py") if "__pycache__" not in path.parts]
    return sorted(files)


def parse_files(folders: tuple[str, ...] | list[str]) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in python_files(folders)}


def check_file(path: Path, module: ast.Module) -> Iterator[str]:
    """Yields a line for a missing file docstring and for each function that does not fit on a screen."""
    if path.stem not in ("__init__", "__main__") and not ast.get_docstring(module):
        yield f"{path}:1: no docstring"
    for node in ast.walk(module):
        if isinstance(node, Function) and (length := function_length(node)) > LONGEST_FUNCTION:
            yield f"{path}:{node.lineno}: {node.name} has {length} lines; at most {LONGEST_FUNCTION}"


def function_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the lines of a function's signature and body, without its docstring."""
    first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
    return (node.end_lineno or 0) - first.lineno + 1 + node.body[0].lineno - node.lineno


def check_class_names(modules: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Yields a line for each class name that is defined in more than one place."""
    places = defaultdict(list)
    for path, module in modules.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1 and name not in ONE_PER_PROGRAM:
            yield f"{found[0]}: class {name} is defined elsewhere too: {', '.join(found[1:])}"


def check_line_budgets() -> Iterator[str]:
    """Yields a line for each group of folders that has more lines of Python than its budget."""
    for folders, budget in LINE_BUDGETS.items():
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(folders))
        if lines > budget:
            yield f"{' + '.join(folders)}: {lines:,} lines of Python; the budget is {budget:,}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
