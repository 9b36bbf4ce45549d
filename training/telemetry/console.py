"""What host 0 prints. On a terminal the progress line is replaced in place; elsewhere each one is a line of its own.

Nobody need be there to read it: a pipe whose reader is gone, or a log on a full disk, does not stop training.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import TextIO

_CLEAR = "\r\x1b[2K"


def warn(message: str) -> None:
    """Shows a warning on standard error."""
    with contextlib.suppress(OSError):
        print(f"tpu-train: warning: {message}", file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Shows a line about what is under way on standard error, beside the results on standard output."""
    with contextlib.suppress(OSError):
        print(f"tpu-train: {message}", file=sys.stderr, flush=True)


class Console:
    """Standard output, or nothing on other hosts."""

    def __init__(self, shown: bool, out: TextIO | None = None) -> None:
        """Prints to `out` (standard output, unless given) if `shown`."""
        self._out = out or sys.stdout
        self._shown, self._is_terminal = shown, self._out.isatty()
        self._line_open = False  # a progress line that the next line replaces

    def print(self, message: str) -> None:
        """Prints a line that stays."""
        self._print(message, stays=True)

    def progress(self, line: str) -> None:
        """Prints a line that the next one may replace."""
        self._print(line, stays=not self._is_terminal)

    def close(self) -> None:
        """Ends an open progress line, so that other output begins on its own line."""
        if self._line_open:
            with contextlib.suppress(OSError):
                print(file=self._out, flush=True)
            self._line_open = False

    def _print(self, text: str, stays: bool) -> None:
        if not self._shown:
            return
        if not stays:  # a line wider than the terminal would wrap, and could not be replaced
            text = text[: shutil.get_terminal_size().columns - 1]
        prefix = _CLEAR if self._line_open else ""
        with contextlib.suppress(OSError):
            print(f"{prefix}{text}", end="\n" if stays else "", file=self._out, flush=True)
        self._line_open = not stays
