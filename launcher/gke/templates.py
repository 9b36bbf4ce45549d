"""Writes YAML: templates, such as jobset.yaml, with values in them, and plain values. Pure.

Every YAML reader gets the same values: YAML 1.1 and 1.2 differ in what they read as a number, boolean, date or null, so
a string that is not plainly a word or a path is quoted.

In a template, `$name` or `$name.attribute` at the end of a line is the YAML of a value, elsewhere its text; alone on a
line it stands for the entries of a mapping or list, if any. A line that ends with `# if name` or `# if not name` is
left out unless that value is true (or false), with the comment above it, and lines below it that are indented further.
"""

import functools
import io
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

_CONDITION = re.compile(r"(.*?) +# if (not )?([\w.]+)")
_LAST_VALUE = re.compile(r"([ -]*)(.*)\$([\w.]+)")
# Every YAML reader reads it as a string without quotes: it begins like a word or a path.
_PLAIN = re.compile(r"[A-Za-z/$(][-A-Za-z0-9_./$()@:=+]*")
_RESERVED_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Returns a template (syntax: above) filled with `values`. Raises KeyError, AttributeError for an unknown name."""
    filled: list[str] = []
    comments: list[str] = []  # above the next line
    left_out: int | None = None  # indentation of the line that was left out last
    for line in template.splitlines():
        indent = len(line) - len(line.lstrip())
        if left_out is not None and indent > left_out:
            continue
        left_out = None
        if condition := _CONDITION.fullmatch(line):
            line, negated, name = condition.groups()
            if bool(_look_up(name, values)) == bool(negated):
                left_out = indent
                comments.clear()
                continue
        if line[indent:].startswith("#"):
            comments.append(_fill_text(line, values))
        else:
            filled += [*comments, *_fill_line(line, values)]
            comments.clear()
    return "".join(f"{line}\n" for line in filled)


def _fill_line(line: str, values: Mapping[str, Any]) -> list[str]:
    """Returns the lines that a template's line (no comment) becomes: a value at its end as YAML, alone as its entries,
    perhaps none; elsewhere as text."""
    if (match := _LAST_VALUE.fullmatch(line)) is None:
        return [_fill_text(line, values)]
    lead, key, name = match.groups()
    first, *rest = dump({"x": _look_up(name, values)}).removesuffix("\n").split("\n")  # rest: indented by two columns
    if key or "-" in lead:
        return [f"{lead}{_fill_text(key, values)}{first[3:]}".rstrip(), *_indent(rest, len(lead))]
    return _indent(rest, len(lead) - 2)


def _indent(lines: list[str], columns: int) -> list[str]:
    return [" " * columns + line if line else line for line in lines]


def _fill_text(line: str, values: Mapping[str, Any]) -> str:
    return re.sub(r"\$(\w+(\.\w+)*)", lambda match: str(_look_up(match[1], values)), line)


def _look_up(name: str, values: Mapping[str, Any]) -> Any:
    """Returns the value of a name, which may have attributes. Raises KeyError, AttributeError."""
    first, *attributes = name.split(".")
    return functools.reduce(getattr, attributes, values[first])


def dump(value: Any) -> str:
    """Returns the YAML of a value made of dicts, lists, strings, whole numbers and booleans, in the given order."""
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)  # list items are indented below their key, too
    yaml.width = 1 << 30  # lines of values are never folded
    yaml.allow_unicode = True
    stream = io.StringIO()
    yaml.dump(_quote(value), stream)
    return stream.getvalue()


def _quote(value: Any) -> Any:
    """Returns the value with ruamel.yaml's type for each string that needs quotes, or fits a literal block."""
    if isinstance(value, dict):
        return {_quote(key): _quote(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_quote(inner) for inner in value]
    if not isinstance(value, str) or (
        _PLAIN.fullmatch(value) and not value.endswith(":") and value.lower() not in _RESERVED_WORDS
    ):
        return value
    return LiteralScalarString(value) if _fits_a_block(value) else DoubleQuotedScalarString(value)


def _fits_a_block(value: str) -> bool:
    """Returns whether a literal block can hold exactly this text: it ends with one line end, begins with no blank, and
    has no characters that need an escape, nor others that end a line (in YAML 1.1)."""
    return (
        value.endswith("\n")
        and not value.endswith("\n\n")
        and not value[0].isspace()
        and re.fullmatch(r"[\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff]*", value) is not None
    )
