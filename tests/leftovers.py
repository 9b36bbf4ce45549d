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
PATIENCE_SECONDS = 10.0  # a thread that was told to end may need the processor first


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
    return {*_threads(), *_children(), *_sockets(), *_files()}


def _files() -> Iterator[str]:
    for name in os.listdir(ROOT):
        if not name.startswith("."):  # caches of tools that run beside the tests
            yield f"file {name}"


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if any(name in thread.name for name in LIBRARY_THREADS):
            continue
        yield f"thread {thread.name} ({thread.ident})"


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        try:
            children = Path(f"/proc/self/task/{task}/children").read_text(encoding="ascii").split()
        except OSError:  # the thread has ended meanwhile
            continue
        for child in children:
            try:
                name = Path(f"/proc/{child}/comm").read_text(encoding="utf-8").strip()
            except OSError:
                continue
            yield f"process {child} ({name})"


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
