"""What host 0 prints. On a terminal the progress line is one line that changes in place; anywhere else each is a line
of its own."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

_CLEAR = "\r\x1b[2K"


class Console:
    """Standard output, or nothing on other hosts."""

    def __init__(self, shown: bool, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._shown, self._in_place, self._open = shown, self._out.isatty(), False

    def print(self, message: str) -> None:
        """A message that stays."""
        self._print(message, stays=True)

    def progress(self, line: str) -> None:
        """A line that the next one may replace."""
        self._print(line, stays=not self._in_place)

    def close(self) -> None:
        """Before others write: what stands in the open line stays."""
        if self._open:
            print(file=self._out, flush=True)
            self._open = False

    def _print(self, text: str, stays: bool) -> None:
        if not self._shown:
            return
        if not stays:  # what is longer than the terminal would begin another line
            text = text[: shutil.get_terminal_size().columns - 1]
        print(f"{_CLEAR if self._open else ''}{text}", end="\n" if stays else "", file=self._out, flush=True)
        self._open = not stays
