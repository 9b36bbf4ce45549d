"""Masks the values of secrets in files that the launcher keeps, in every form in which programs write them. Pure.

Values are found unchanged, escaped (JSON, once and twice; Python; shell; URL; HTML), in base64 (also inside a longer
text), in hexadecimal, and line by line. A short value (`1`, `info`) also occurs by accident: below `_LONG` characters
it is masked only as a separate word, below `_WORD` only after its variable's name.
"""

import base64
import html
import json
import re
import shlex
import urllib.parse
from collections.abc import Iterator, Mapping

MASK = b"***"

_LONG = 8  # characters; a longer value does not occur by accident
_WORD = 4


class SecretMasker:
    """Replaces the values of secrets (variable name -> value) by `MASK`."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
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
                    self._expressions.append(_after_name(name, part))
        # One form may contain another: the longest are replaced first.
        self._literals = sorted(literals, key=len, reverse=True)
        longest_first = sorted(words, key=len, reverse=True)
        self._expressions += [_word(word) for word in longest_first]

    @property
    def longest(self) -> int:
        """Returns the bytes of the longest form of a long value. A text that was cut off may begin with all but one of
        them."""
        return max(map(len, self._literals), default=0)

    def mask(self, data: bytes) -> bytes:
        """Returns the data with `MASK` for every form of the values; short ones only as a word or after their name."""
        for literal in self._literals:
            data = data.replace(literal, MASK)
        for expression in self._expressions:
            data = expression.sub(rb"\g<1>" + MASK, data)
        return data

    def mask_text(self, text: str) -> str:
        """Returns a text masked as `mask` does; bytes that are not UTF-8 are in it as Python's surrogates."""
        return self.mask(text.encode(errors="surrogateescape")).decode(errors="surrogateescape")


def _parts(value: str) -> Iterator[str]:
    """Yields the value, also without white space around it, and its lines of 8 characters or more, which a log shows
    separately."""
    yield value
    yield value.strip()
    if "\n" in value:
        yield from (stripped for line in value.splitlines() if len(stripped := line.strip()) >= _LONG)


# Both patterns begin with a literal, which `re` finds quickly.
def _after_name(name: str, value: str) -> re.Pattern[bytes]:
    """Returns a pattern for a short value after its variable's name (group 1): NAME=1, NAME='1', "NAME": "1"."""
    between = rb"(=[\"']?|\": ?\")"
    return re.compile(b"(" + re.escape(name.encode()) + between + b")" + re.escape(value.encode()) + rb"(?![\w-])")


def _word(form: bytes) -> re.Pattern[bytes]:
    """Returns a pattern for a form that is not part of a longer word; group 1 is empty."""
    escaped = re.escape(form)
    return re.compile(b"()" + escaped + rb"(?<![\w-]" + escaped + rb")(?![\w-])")


def _escaped(value: str) -> Iterator[bytes]:
    """Yields the value unchanged and as JSON (once and twice), Python, shells, URLs and HTML escape it."""
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
    """Yields the value in hexadecimal and in base64, alone and as a part of a longer encoded text."""
    data = value.encode(errors="surrogateescape")
    yield from (data.hex().encode(), data.hex().upper().encode())
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(data)
        # Inside a longer text ("user:value"), at any of three offsets: the digits that hold bits of the value alone.
        for offset in range(3):
            whole = encode(b"\0" * offset + data)
            yield whole[-(-offset * 8 // 6) : (offset + len(data)) * 8 // 6]
