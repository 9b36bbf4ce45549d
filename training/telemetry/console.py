"""Prints on host 0. A terminal's progress line is replaced in place; elsewhere each progress line is a line of its own.

A failed write (a closed pipe, a log on a full disk) is ignored, so that it does not stop training.
"""

import contextlib
import shutil
import sys
from typing import TextIO

_CLEAR = "\r\x1b[2K"


def warn(message: str) -> None:
    """Prints a warning on standard error."""
    note(f"warning: {message}")


def note(message: str) -> None:
    """Prints a line on standard error; standard output is for results."""
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not change the exit code
        print(f"tpu-train: {message}", file=sys.stderr, flush=True)


class Console:
    """Prints to standard output, or to `out`; with `shown` false, as on every host but host 0, nothing."""

    def __init__(self, shown: bool, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._shown, self._is_terminal = shown, self._out.isatty()
        self._line_open = False  # the last line is a progress line that the next one replaces

    def print(self, message: str) -> None:
        """Prints a line that stays, in place of an open progress line."""
        self._print(message, stays=True)

    def progress(self, line: str) -> None:
        """Prints a progress line: on a terminal cut to its width and replaced by the next line, elsewhere kept."""
        self._print(line, stays=not self._is_terminal)

    def close(self) -> None:
        """Ends an open progress line with a newline, so that other output begins on its own line. Closes no file."""
        if self._line_open:
            with contextlib.suppress(OSError):
                print(file=self._out, flush=True)
            self._line_open = False

    def _print(self, text: str, stays: bool) -> None:
        """Prints `text`, if `shown`, over an open progress line; unless `stays`, `text` is the next open one."""
        if not self._shown:
            return
        if not stays:  # a wider line would wrap, and could not be replaced
            text = text[: shutil.get_terminal_size().columns - 1]
        prefix = _CLEAR if self._line_open else ""
        with contextlib.suppress(OSError):
            print(f"{prefix}{text}", end="\n" if stays else "", file=self._out, flush=True)
        self._line_open = not stays
