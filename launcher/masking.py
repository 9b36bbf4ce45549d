"""Masks values of secrets in what is kept: in every form in which programs write them. Pure.

A value is looked for as it is, escaped (JSON, once and twice; Python; shell; URL; HTML), in base64 also inside a longer
text, in hexadecimal, and line by line where it has several lines. A short value (`1`, `info`) occurs by accident: below
`_LONG` characters it is masked as a word of its own, below `_WORD` only behind its variable's name.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
import urllib.parse
from collections.abc import Iterator, Mapping

MASK = b"***"

_LONG = 8  # characters: such a value does not occur by accident
_WORD = 4


class Masker:
    """Replaces the values of some secrets, and their forms, by `MASK`."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        """`secrets`: name of the variable -> value."""
        literals: set[bytes] = set()
        words: set[bytes] = set()
        self._expressions: list[re.Pattern[bytes]] = []
        for name, value in secrets.items():
            for part in _parts(value):
                if len(part) >= _LONG:
                    literals.update(_escaped(part), _encoded(part))
                elif len(part) >= _WORD:
                    words.update(_escaped(part))
                elif part:
                    self._expressions.append(_behind(name, part))
        # A form may hold a shorter one: the longest are replaced first.
        self._literals = sorted(literals, key=len, reverse=True)
        longest_first = sorted(words, key=len, reverse=True)
        self._expressions += [_word(word) for word in longest_first]

    @property
    def longest(self) -> int:
        """Bytes of the longest form: what precedes a text that was cut may begin with so many less one of a value."""
        return max(map(len, self._literals), default=0)

    def mask(self, data: bytes) -> bytes:
        """The data without the values."""
        for literal in self._literals:
            data = data.replace(literal, MASK)
        for expression in self._expressions:
            data = expression.sub(rb"\g<1>" + MASK, data)
        return data


def _parts(value: str) -> Iterator[str]:
    """The value, and its lines: a log shows one a line."""
    yield value
    yield value.strip()
    if "\n" in value:
        yield from (stripped for line in value.splitlines() if len(stripped := line.strip()) >= _LONG)


# Both patterns begin with a literal, which `re` finds quickly.
def _behind(name: str, value: str) -> re.Pattern[bytes]:
    """A short value where it stands behind its name: NAME=1, NAME='1', "NAME": "1"."""
    between = rb"(=[\"']?|\": ?\")"
    return re.compile(b"(" + re.escape(name.encode()) + between + b")" + re.escape(value.encode()) + rb"(?![\w-])")


def _word(form: bytes) -> re.Pattern[bytes]:
    """A form that is no part of a longer word."""
    escaped = re.escape(form)
    return re.compile(b"()" + escaped + rb"(?<![\w-]" + escaped + rb")(?![\w-])")


def _escaped(value: str) -> Iterator[bytes]:
    in_json = [json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)]
    # Go escapes these three for HTML, as `docker inspect` prints them.
    in_json += [re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text) for text in in_json]
    data = value.encode(errors="surrogateescape")
    in_urls = [urllib.parse.quote(data, safe=""), urllib.parse.quote(data), urllib.parse.quote_plus(data)]
    in_urls += [re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), text) for text in in_urls]
    forms = [
        value,
        *in_json,
        *(json.dumps(text)[1:-1] for text in in_json),
        *in_urls,
        repr(value)[1:-1],
        repr(data)[2:-1],
        shlex.quote(value).removeprefix("'").removesuffix("'"),
        value.replace("'", "'\\''"),
        html.escape(value),
    ]
    yield from (form.encode(errors="surrogateescape") for form in forms)


def _encoded(value: str) -> Iterator[bytes]:
    data = value.encode(errors="surrogateescape")
    yield from (data.hex().encode(), data.hex().upper().encode())
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(data)
        # Inside a longer text ("user:value"), at any of three offsets: the digits that hold bits of the value alone.
        for offset in range(3):
            whole = encode(b"\0" * offset + data)
            yield whole[-(-offset * 8 // 6) : (offset + len(data)) * 8 // 6]
