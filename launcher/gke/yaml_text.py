"""YAML that people read: plain values to text, in the order given, with comments. Pure and deterministic.

`Noted(value, comment)` puts a comment above a key or a list item. Values are dicts, lists, strings, whole numbers and
booleans; strings are quoted only where YAML would take them for something else.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

_WIDTH = 110  # of comments


@dataclass(frozen=True)
class Noted:
    """A value, and what to know about it."""

    value: Any
    comment: str


def plain(node: Any) -> Any:
    """The value without its comments."""
    if isinstance(node, Noted):
        return plain(node.value)
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(value) for value in node]
    return node


def documents(nodes: Iterable[Any], heading: str = "") -> str:
    """Several documents as one file, below a heading of comments."""
    return "".join(f"{line}\n" for line in _comment(heading, "")) + "---\n".join(text(node) for node in nodes)


def text(node: Any) -> str:
    """One document. What it says is `plain(node)`."""
    said = "\n".join(_block(node, "")) + "\n"
    assert yaml.safe_load(said) == plain(node)
    return said


def _block(node: Any, indent: str) -> list[str]:
    lines: list[str] = []
    if isinstance(node, Noted):
        return [*_comment(node.comment, indent), *_block(node.value, indent)]
    if not node:
        return [indent + _scalar(node)]
    if isinstance(node, dict):
        for key, noted in node.items():
            value, comment = _split(noted)
            lines += _comment(comment, indent)
            if isinstance(value, dict | list) and value:
                lines += [f"{indent}{_scalar(key)}:", *_block(value, indent + "  ")]
            else:
                lines += _leaf(f"{indent}{_scalar(key)}: ", value, indent)
        return lines
    assert isinstance(node, list)
    for noted in node:
        value, comment = _split(noted)
        lines += _comment(comment, indent)
        if isinstance(value, dict | list) and value:
            first, *rest = _block(value, indent + "  ")
            hoisted = []
            while first.lstrip().startswith("#"):  # a comment of the first key goes above the dash
                hoisted.append(indent + first.lstrip())
                first, *rest = rest
            lines += [*hoisted, f"{indent}- {first[len(indent) + 2 :]}", *rest]
        else:
            lines += _leaf(f"{indent}- ", value, indent)
    return lines


def _split(node: Any) -> tuple[Any, str]:
    return (node.value, node.comment) if isinstance(node, Noted) else (node, "")


def _leaf(start: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, str) and "\n" in value and _fits_a_block(value):
        return [f"{start}|", *(f"{indent}  {line}" if line else "" for line in value[:-1].split("\n"))]
    return [start + _scalar(value)]


def _fits_a_block(value: str) -> bool:
    """Whether a literal block says exactly this: one line end at its end, no blank first, nothing that a block can't
    hold."""
    return (
        value.endswith("\n")
        and not value.endswith("\n\n")
        and not value[0].isspace()
        and re.fullmatch(r"[\n\x20-\x7e\xa0-\ud7ff]*", value) is not None
    )


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)  # numbers, booleans, {} and []
    if (
        re.fullmatch(r"[A-Za-z0-9_./$(][-A-Za-z0-9_./$()@:=+]*", value)
        and not value.endswith(":")
        and yaml.safe_load(value) == value
    ):
        return value
    # With YAML's own escapes where needed: JSON's surrogate pairs mean nothing to it.
    return (
        json.dumps(value)
        if value.isascii()
        else yaml.safe_dump(value, default_style='"', allow_unicode=True, width=1 << 30).rstrip("\n")
    )


def _comment(comment: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in textwrap.wrap(comment, _WIDTH - len(indent), break_on_hyphens=False)]
