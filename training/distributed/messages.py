"""The messages between hosts: one JSON object a line. Only `decode` turns bytes into a message.

`decode` accepts a line that is UTF-8, JSON without NaN, infinities and texts that can't be printed, an object of a kind
that is allowed now, with exactly the fields of that kind, each of its type and within its limits. Everything else
raises Malformed, for which only the sender's connection is closed.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Message = dict[str, Any]

HANDSHAKE_BYTES = 4096  # limit of a line during the handshake
HANDSHAKE_SECONDS = 5.0  # then host 0 closes the connection of a peer without a proof
HOST_BYTES = 4 << 20  # limit of a line from a host: a payload
SERVER_BYTES = 256 << 20  # limit of a line from host 0: the payloads of all hosts
TEXT_CHARACTERS = 600


class Malformed(ValueError):
    """Bytes that are no message of this protocol. The message says why."""


def _is_whole(value: Any) -> bool:
    """Returns whether a value is an int, not a bool, from 0 to 2**31 - 1."""
    return type(value) is int and 0 <= value < 1 << 31


def _is_text(value: Any) -> bool:
    """Returns whether a value is a string of at most TEXT_CHARACTERS."""
    return isinstance(value, str) and len(value) <= TEXT_CHARACTERS


def _is_digest(value: Any) -> bool:
    """Returns whether a value is 32 bytes in hexadecimal."""
    return isinstance(value, str) and len(value) == 64 and all(digit in "0123456789abcdef" for digit in value)


def _is_seconds(value: Any) -> bool:
    """Returns whether a value is a number from 0 to ten years."""
    return type(value) in (int, float) and 0 <= value <= 3660 * 86400.0


def _is_a(kind: type) -> Callable[[Any], bool]:
    """Returns a check for values of just this type; `object`: any value that `decode` accepts."""
    return lambda value: kind is object or type(value) is kind


Kinds = Mapping[str, Mapping[str, Callable[[Any], bool]]]
"""Allowed messages by kind, which is the name of their first field: each field with a check of its value."""

CHALLENGE: Kinds = {"challenge": {"challenge": _is_digest}}
"""Host 0's first line on a connection."""

HELLO: Kinds = {
    "hello": {
        "hello": _is_whole,
        "run_id": _is_text,
        "attempt": _is_whole,
        "hosts": _is_whole,
        "exchange": _is_a(bool),
        "nonce": _is_digest,
        "proof": _is_digest,
    }
}
"""A host's first line."""

ANSWER: Kinds = {
    "welcome": {"welcome": _is_a(bool), "proof": _is_digest},
    "refused": {"refused": _is_text, "final": _is_a(bool), "proof": _is_digest},
}
"""Host 0's answer to a hello with a valid proof."""

# "phase": what the host does; "arrive": the name of a barrier, where it waits; "goodbye": its exit code.
FROM_HOST: Kinds = {
    "phase": {"phase": _is_text},
    "arrive": {"arrive": _is_text, "payload": _is_a(object), "seconds": _is_seconds},
    "goodbye": {"goodbye": _is_whole, "reason": _is_text, "overdue": _is_a(bool)},
}

# "complete": the barrier that all hosts have reached; "lost": why the attempt ends, and the others' exit code; "news":
# the phases of all hosts, and that of host 0.
FROM_SERVER: Kinds = {
    "complete": {"complete": _is_text, "payloads": _is_a(list)},
    "lost": {"lost": _is_a(str), "code": _is_whole},
    "news": {"news": _is_a(str), "host_0": _is_text},
}


def decode(line: bytes | bytearray, kinds: Kinds) -> tuple[str, Message]:
    """Parses a line as a message with just the fields of one of `kinds`, whose checks their values pass; returns kind
    and message, or raises Malformed."""
    try:
        message = json.loads(line.decode())
        # Raises for NaN, infinities and lone surrogates, anywhere in it; for nesting, before host 0's later encoding.
        _CHECKER.encode([[[[[[[[message]]]]]]]]).encode()
    except RecursionError:
        raise Malformed("nested too deeply") from None
    except ValueError as error:
        raise Malformed(f"not allowed JSON: {error}") from None
    if not isinstance(message, dict):
        raise Malformed("not an object")
    kind = next((name for name in kinds if name in message), None)
    if kind is None:
        raise Malformed(f"none of {', '.join(kinds)}")
    fields = kinds[kind]
    if message.keys() != fields.keys():
        raise Malformed(f"{kind} must have the fields {', '.join(fields)}")
    for name, is_valid in fields.items():
        if not is_valid(message[name]):
            raise Malformed(f"{kind}: the value of {name} is not allowed")
    return kind, message


# json.dumps would make an encoder for each line.
_CHECKER, _ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False), json.JSONEncoder(allow_nan=False)


def encode(message: Mapping[str, Any]) -> bytes:
    """Returns the line of a message. Raises ValueError for a payload with NaN or an infinity."""
    return _ENCODER.encode(message).encode() + b"\n"


def clip(text: str) -> str:
    """Returns the first TEXT_CHARACTERS of a text, with characters that can't be encoded replaced."""
    return text.encode(errors="replace").decode()[:TEXT_CHARACTERS]


class LineBuffer:
    """Splits a stream into lines of at most `limit` bytes. `limit` may be changed between two lines."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes = bytearray()
        self._searched = 0  # the number of leading bytes without a line end

    @property
    def is_empty(self) -> bool:
        """Returns whether no bytes are left after the last line that was taken, complete lines included."""
        return not self._bytes

    def feed(self, data: bytes) -> Iterator[bytearray]:
        """Adds bytes, once iterated, and yields complete lines without their ends; keeps lines that are not taken, and
        the beginning of the next. Raises Malformed for a line over `limit`, finished or not."""
        self._bytes += data
        while (end := self._bytes.find(b"\n", self._searched)) >= 0:
            if end > self.limit:
                break
            line = self._bytes[:end]
            del self._bytes[: end + 1]
            self._searched = 0
            yield line
        self._searched = len(self._bytes)
        if self._searched > self.limit:
            raise Malformed(f"a line of more than {self.limit} bytes")
