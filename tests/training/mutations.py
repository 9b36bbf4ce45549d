"""Ways to spoil an input: JSON values, bytes and lines of text by a random number generator, and a byte of a file."""

import copy
import functools
from pathlib import Path
from random import Random
from typing import Any

TEXTS = (
    "", " ", "a", " a", "a\n", "\t", "\ud800", "a\ud83d", "\0", "\ufeff", "²", "٣", "../x", "/", "a/b", "gs://",
    "gs:/b",
    "GS://b/c", "s3://b/c", "file:///x", "gs://b/c", "gs://B!/c", "nan", "1", "-1", "1e999", "true", "null", "é",
    "\u2028", "x" * 300, "a,b", '"', "'", "{", "[", "<<", "loss", "accurcy", "model.safetensors", "\U0001f600",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 7, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 63, 10**30, -(10**30), 0.5, -0.5, 1e308, 5e-324, float("inf"),
    float("-inf"), float("nan"),
)  # fmt: skip


def nasty(random: Random) -> Any:
    """A value that hardly any key may have."""
    kind = random.randrange(9)
    if kind < 3:
        return random.choice(TEXTS)
    if kind < 5:
        return random.choice(NUMBERS)
    if kind == 5:
        return random.choice((None, True, False))
    if kind == 6:
        return [nasty(random) for _ in range(random.randrange(3))]
    if kind == 7:
        return {random.choice(TEXTS): nasty(random) for _ in range(random.randrange(3))}
    return functools.reduce(lambda inner, _: [inner], range(random.choice((1, 5, 60, 300))), [])


def spoil_json(value: Any, random: Random) -> Any:
    """A copy in which one to three parts are replaced, left out, renamed or added."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return nasty(random)
        parent, key = random.choice(places)
        action = random.randrange(6)
        if action == 0 and isinstance(parent, dict):
            del parent[key]
        elif action == 1 and isinstance(parent, dict):
            parent[random.choice(TEXTS)] = parent.pop(key)
        elif action == 2 and isinstance(parent, list):
            parent.insert(key, parent[key])
        elif action == 3 and isinstance(parent, dict):
            parent[random.choice(TEXTS)] = nasty(random)
        elif action == 4 and isinstance(parent[key], int) and not isinstance(parent[key], bool):
            parent[key] += random.choice((-1, 1, 1000))
        else:
            parent[key] = nasty(random)
    return value


def _places(value: Any) -> Any:
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield value, key
        yield from _places(below)


def spoil_bytes(data: bytes, random: Random) -> bytes:
    """One to four bytes, stretches or ends changed, removed or repeated."""
    mutated = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        if not mutated:
            return random.randbytes(5)
        start = random.randrange(len(mutated))
        end = min(len(mutated), start + random.choice((1, 1, 4, 40)))
        old, flipped = mutated[start:end], bytes([mutated[start] ^ 1 << random.randrange(8)])
        if random.randrange(6) == 0:
            del mutated[start:]
        else:
            others = (flipped + old[1:], random.randbytes(len(old)), b"", old + old, bytes(len(old)))
            mutated[start:end] = random.choice(others)
    return bytes(mutated)


def spoil_lines(text: str, pieces: tuple[str, ...], random: Random) -> str:
    """One to four lines removed, repeated elsewhere, indented, joined or (in part) replaced by a piece."""
    lines = text.splitlines(keepends=True)
    for _ in range(random.choice((1, 1, 2, 4))):
        if not lines:
            return random.choice(pieces)
        number, piece = random.randrange(len(lines)), random.choice(pieces)
        line = lines[number]
        start = random.randrange(len(line) + 1)
        spliced = line[:start] + piece + line[start + random.randrange(8) :]
        others = ([], [line, random.choice(lines)], ["  " + line], [line.rstrip("\n")], [piece + "\n", line], [spliced])
        lines[number : number + 1] = random.choice(others)
    return "".join(lines)


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flips the bits of `mask` in one byte of a file; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)
