"""In CI, and with TPU_LAUNCH_NO_SKIPS=1, a test that did not run (skipped, expected to fail) makes the run fail.

Tests marked `nightly` are left out, except where `-m nightly` asks for them.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import IO, Any

import pytest

# Tests of these folders share a process, so a thread or socket of one can fail another.
CHECKED_FOR_LEFTOVERS = ("tests/launcher/", "tests/training/", "tests/emulator/")

with contextlib.suppress(ImportError):  # some images have no hypothesis
    from hypothesis import settings

    settings.register_profile("no-deadline", settings.default, deadline=None)  # a busy machine takes its time
    settings.load_profile("no-deadline")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" in config.option.markexpr:
        return
    later = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.nodeid.startswith(CHECKED_FOR_LEFTOVERS) and os.path.isdir("/proc/self/fd"):  # Linux
        from tests.leftovers import fail_on_leftovers

        yield from fail_on_leftovers()
    else:
        yield


@pytest.fixture(autouse=True)
def locks_as_on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses, as NFS does, an exclusive flock of a file not open for writing, a shared one of one not for reading."""
    flock = fcntl.flock

    def refuse_or_lock(file: IO[Any] | int, operation: int) -> None:
        refused = {fcntl.LOCK_EX: os.O_RDONLY, fcntl.LOCK_SH: os.O_WRONLY}.get(operation & ~fcntl.LOCK_NB)
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == refused:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", refuse_or_lock)


def forbidden(reporter: Any) -> list[str]:
    """Returns the tests that did not run, where that is a failure; `reporter`: pytest's, of the terminal."""
    strict = os.environ.get("CI") or os.environ.get("TPU_LAUNCH_NO_SKIPS") == "1"
    kinds = ("skipped", "xfailed", "xpassed") if strict else ()
    return [report.nodeid for kind in kinds for report in reporter.stats.get(kind, ())]


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus == pytest.ExitCode.OK and forbidden(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if names := forbidden(terminalreporter):
        terminalreporter.section("not run, which is a failure here")
        terminalreporter.write("".join(f"{name}\n" for name in names))
