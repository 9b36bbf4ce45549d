"""Damages a file as a broken disk would."""

from pathlib import Path


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flips the bits of `mask` in one byte of a file; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)
