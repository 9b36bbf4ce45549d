"""Writes plain values as YAML with comments, in the given order. Pure and deterministic.

`Commented(value, comment)` puts a comment above a key or a list item. Values are dicts, lists, strings, whole numbers
and booleans. Every YAML reader gets the same values: YAML 1.1 and 1.2 differ in what they read as a number, boolean,
date or null, so a string that is not plainly a word or a path is quoted.
"""

import io
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

_COMMENT_WIDTH = 110
_INDENT = 2  # list items are indented below their key, too
# Every YAML reader reads it as a string without quotes: it begins like a word or a path.
_PLAIN = re.compile(r"[A-Za-z/$(][-A-Za-z0-9_./$()@:=+]*")
_RESERVED_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


@dataclass(frozen=True)
class Commented:
    """A value with a comment above it."""

    value: Any
    comment: str


def dump_documents(nodes: Iterable[Any], heading: str = "") -> str:
    """Returns the YAML of several documents, below a heading in comments."""
    lines = "".join(f"# {line}\n" for line in _wrap(heading, 0).splitlines())
    return lines + "---\n".join(dump(node) for node in nodes)


def dump(node: Any) -> str:
    """Returns the YAML of one document."""
    yaml = YAML()
    yaml.indent(mapping=_INDENT, sequence=2 * _INDENT, offset=_INDENT)
    yaml.width = 1 << 30  # lines of values are never folded
    yaml.allow_unicode = True
    stream = io.StringIO()
    value, comment = _split(node)
    stream.writelines(f"# {line}\n" for line in _wrap(comment, 0).splitlines())
    yaml.dump(_convert(value, 0), stream)
    return stream.getvalue()


def _convert(value: Any, column: int) -> Any:
    """Converts a value to ruamel.yaml's types, with comments and quotes. `column`: where its keys or items begin."""
    if isinstance(value, dict):
        mapping = CommentedMap()
        for key, node in value.items():
            inner, comment = _split(node)
            mapping[_scalar(key)] = _convert(inner, column + (2 * _INDENT if isinstance(inner, list) else _INDENT))
            if comment:
                mapping.yaml_set_comment_before_after_key(_scalar(key), before=_wrap(comment, column), indent=column)
        return mapping
    if isinstance(value, list):
        sequence = CommentedSeq()
        for index, node in enumerate(value):
            inner, comment = _split(_hoist(node))
            sequence.append(_convert(inner, column))
            if comment:
                dash = column - _INDENT
                sequence.yaml_set_comment_before_after_key(index, before=_wrap(comment, dash), indent=dash)
        return sequence
    return _scalar(value)


def _hoist(item: Any) -> Any:
    """Returns a list item with its first key's comment moved above the item's dash; an item without one unchanged."""
    value, comment = _split(item)
    first = next(iter(value), None) if isinstance(value, dict) else None
    if first is None or not isinstance(value[first], Commented):
        return item
    comments = [part for part in (comment, value[first].comment) if part]
    return Commented({**value, first: value[first].value}, "\n".join(comments))


def _split(node: Any) -> tuple[Any, str]:
    """Returns a node's value, and its comment; "" without one."""
    return (node.value, node.comment) if isinstance(node, Commented) else (node, "")


def _scalar(value: Any) -> Any:
    """Returns a string with the quotes that it needs, or as a literal block; any other value unchanged."""
    if not isinstance(value, str):
        return value
    if _PLAIN.fullmatch(value) and not value.endswith(":") and value.lower() not in _RESERVED_WORDS:
        return value
    return LiteralScalarString(value) if _fits_a_block(value) else DoubleQuotedScalarString(value)


def _fits_a_block(value: str) -> bool:
    """Returns whether a literal block can hold exactly this text: it ends with one line end, begins with no blank, and
    has no characters that need an escape."""
    return (
        value.endswith("\n")
        and not value.endswith("\n\n")
        and not value[0].isspace()
        and re.fullmatch(r"[\n\x20-\x7e\xa0-\ud7ff]*", value) is not None
    )


def _wrap(comment: str, column: int) -> str:
    """Wraps a comment to the width left at a column."""
    width = _COMMENT_WIDTH - column
    return "\n".join(
        line for part in comment.split("\n") for line in textwrap.wrap(part, width, break_on_hyphens=False)
    )
