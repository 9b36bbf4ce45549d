"""What lint holds about the structure of the code, and no other linter does: check_structure.py [FOLDER...]

- a function is at most 60 lines long, its docstring not counted;
- a folder of the packages holds at most a dozen Python files beside `__init__.py` and `__main__.py`;
- a file opens with a docstring, and so does every public class, function and method (of a Protocol and of its
  implementation, the Protocol's is enough).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST_FUNCTION = 60
LARGEST_FOLDER = 12
PACKAGES = ("launcher", "training")

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def main(folders: list[str]) -> int:
    """Prints a line for each mistake. 1 when there is one."""
    mistakes = [mistake for folder in folders or PACKAGES for mistake in check_folder(Path(folder))]
    print(*mistakes, sep="\n", end="\n" if mistakes else "")
    return int(bool(mistakes))


def check_folder(folder: Path) -> Iterator[str]:
    """The mistakes of all files below `folder`."""
    files = sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    for place in sorted({path.parent for path in files}):
        count = sum(path.parent == place and not path.stem.startswith("__") for path in files)
        if count > LARGEST_FOLDER:
            yield f"{place}: {count} files, and a folder has at most {LARGEST_FOLDER}: group them"
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    documented = protocol_methods(modules.values())
    for path, module in modules.items():
        if path.stem != "__init__" and path.stem != "__main__" and not ast.get_docstring(module):
            yield f"{path}:1: no docstring"
        yield from check_lengths(path, module)
        yield from check_docstrings(path, module.body, documented)


def protocol_methods(modules: Iterator[ast.Module] | object) -> set[str]:
    """Names of the methods that a Protocol of these modules documents: an implementation need not repeat it."""
    names = set()
    for module in modules:  # type: ignore[attr-defined]
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                names |= {item.name for item in node.body if isinstance(item, Function) and ast.get_docstring(item)}
    return names


def check_lengths(path: Path, module: ast.Module) -> Iterator[str]:
    """Functions that are longer than a screen."""
    for node in ast.walk(module):
        if isinstance(node, Function):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            length = (node.end_lineno or 0) - first.lineno + 1
            signature = node.body[0].lineno - node.lineno
            if length + signature > LONGEST_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {length + signature} lines; at most {LONGEST_FUNCTION}"


def check_docstrings(path: Path, body: list[ast.stmt], documented: set[str], owner: str = "") -> Iterator[str]:
    """Public definitions without a docstring."""
    for node in body:
        if not isinstance(node, (*Function, ast.ClassDef)) or node.name.startswith("_"):
            continue
        inherited = owner and (node.name in documented or is_overload(node))
        if not ast.get_docstring(node) and not inherited:
            yield f"{path}:{node.lineno}: {owner}{node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from check_docstrings(path, node.body, documented, f"{node.name}.")


def is_overload(node: ast.AST) -> bool:
    """Whether a method is a setter or an overload of one that has the docstring."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(decorator).endswith((".setter", "overload", "override")) for decorator in decorators)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
