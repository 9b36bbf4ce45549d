"""Which lives reach what a patch changes: a life that does not is the same with the patch and without it.

In a copy of the tree, a call is put before the innermost statement of each change, and lives are played. Where that
can't be told (a constant of a module, a new function), every life counts as one that does.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

_MARK = "_reached"
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def changed_lines(before: str, after: str) -> Iterator[int]:
    """Numbers, from 1 on, of the lines of `before` that are changed, or after which there is something new."""
    old, new = before.splitlines(), after.splitlines()
    for what, first, last, _, _ in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what == "insert":
            yield max(first, 1)
        elif what != "equal":
            yield from range(first + 1, last + 1)


def place(source: str, line: int) -> int | None:
    """The line before which a call can be put to know that this line is reached: that of the innermost statement which
    covers it. None when the line is in no function, or in the head of one."""
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


def mark(source: str, places: Iterable[tuple[int, int]]) -> str:
    """The source with a call before each line that says a number; `places`: (line, number)."""
    lines = source.splitlines(keepends=True)
    for line, number in sorted(places, reverse=True):
        text = lines[line - 1]
        lines.insert(line - 1, f"{text[: len(text) - len(text.lstrip())]}{_MARK}({number})\n")
    return "".join(lines)


def places_of(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, set[int]] | None:
    """File -> lines before which a call must be put to know that a change was reached; None when that can't be told.
    `before` and `after`: the changed files."""
    places: dict[str, set[int]] = {}
    for name, source in before.items():
        for line in changed_lines(source, after[name]):
            found = place(source, line)
            if found is None:
                return None
            places.setdefault(name, set()).add(found)
    return places


def record(side: str, seeds: Sequence[int]) -> dict[int, list[int]]:
    """Number -> the lives that reach what it marks. For a copy of the tree that `mark` has changed."""
    from tests.simulation.__main__ import load

    reached: set[int] = set()
    setattr(builtins, _MARK, reached.add)
    play = load(side).play
    lives: dict[int, list[int]] = {}
    for seed in seeds:
        reached.clear()
        play(seed)
        for number in reached:
            lives.setdefault(number, []).append(seed)
    return lives


if __name__ == "__main__":  # python -m tests.simulation.reached SIDE FIRST LIVES
    print(json.dumps(record(sys.argv[1], range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])))))
