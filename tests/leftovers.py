"""Fails a test that leaves a thread, a child process, a listening socket, or a file in the checkout behind.

A thread of one test can fail another one minutes later, where the cause can't be seen. Fixtures of a wider scope
than one test are set up before the first look, so what they keep open does not count.
"""

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# google-cloud-storage looks at the bucket beside the first request, and after a 404
LIBRARY_THREADS = ("_fetch_background", "_verify_existence_background")
PATIENCE_SECONDS = 60.0  # a thread that was told to end may need the processor first


def fail_on_leftovers() -> Iterator[None]:
    """Compares what exists before and after a test, and waits a while for what is about to end."""
    before = look()
    yield
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := look() - before:
        gc.collect()  # what is no longer used may still be held by a cycle
        if time.monotonic() > deadline:
            pytest.fail(f"left behind by this test: {', '.join(sorted(left))}", pytrace=False)
        time.sleep(0.01)


def look() -> set[str]:
    """Returns the threads, children and listening sockets of this process, and the files at the checkout's top."""
    files = {f"file {name}" for name in os.listdir(ROOT) if not name.startswith(".")}  # hidden: caches of other tools
    threads = {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not any(name in thread.name for name in LIBRARY_THREADS)
    }
    return {*files, *threads, *_children(), *_sockets()}


def _children() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        for child in _read(task / "children").split():
            if name := _read(Path("/proc", child, "comm")).strip():
                yield f"process {child} ({name})"


def _read(path: Path) -> str:
    """Returns a file's text; "" where its thread or process has ended meanwhile."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _sockets() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if not target.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as duplicate:
                if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield f"listening {target} ({duplicate.getsockname()})"
        except OSError:  # closed meanwhile
            continue
