"""Claims about logs: each line once and whole, however the looks were and in whichever parts an engine stores it."""

import errno
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import container_output
from launcher.container_output import CUT, LogWindow, kubelet_records, read_log
from launcher.provider import LogLine, Observation
from launcher.run import logs
from launcher.run.logs import Cursor, HostLog, next_page, read_from
from launcher.tpu_vm import host_scripts, provider
from launcher.tpu_vm.provider import TpuVm

BEGIN = datetime(2026, 1, 1)


def stamp(milliseconds: int) -> str:
    return (BEGIN + timedelta(milliseconds=milliseconds)).isoformat(timespec="microseconds") + "000Z"


def engine_log(history: list[LogLine], since: str | None) -> list[LogLine]:
    """Returns the lines from a time on, inclusive, in the order in which they were written."""
    return [line for line in history if since is None or line.timestamp >= since]


@given(
    st.lists(st.integers(0, 30), max_size=30).map(lambda sizes: [LogLine(stamp(0), "x" * size) for size in sizes]),
    st.sampled_from(["", f"{stamp(0)} unfinished" * 9]),
)
def test_a_log_is_read_in_pieces_without_an_unfinished_line_which_is_repaired(
    tmp_path_factory: pytest.TempPathFactory, history: list[LogLine], unfinished: str
) -> None:
    path: Path = tmp_path_factory.mktemp("log") / "host-0.log"
    path.write_text("".join(f"{line.timestamp} {line.text}\n" for line in history) + unfinished)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_BLOCK_BYTES", 30)
        patch.setattr(logs, "_PIECE_BYTES", 50)
        for repair in (lambda path: None, HostLog):
            repair(path)
            (lines, offset), read = read_from(path, 0), list[LogLine]()
            while lines:
                assert sum(len(f"{line.timestamp} {line.text}\n") for line in lines[:-1]) <= 100
                read += lines
                lines, offset = read_from(path, offset)
            assert (read, offset) == (history, sum(len(f"{line.timestamp} {line.text}\n") for line in history))
    assert offset == path.stat().st_size


FULL = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))


def test_lines_that_do_not_fit_on_the_disk_stay_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = HostLog(tmp_path / "host-0.log")
    history = [LogLine(stamp(number), f"line {number}") for number in range(6)]
    assert log.append_new(history[:2], None) == history[:2]
    asked = log.cursor.since
    with monkeypatch.context() as full:
        full.setattr(logs, "write_whole", lambda file, data: FULL(file.write(data[: len(data) // 2])))
        with pytest.raises(OSError, match="No space"):
            log.append_new(history[2:4], asked)
    assert log.cursor.since == asked
    assert read_from(log.path, 0)[0] == history[:2], "nothing of them is in the file"
    assert log.append_new(history[4:], history[3].timestamp) == [], "the next page, asked for before"
    assert log.append_new(history[:4], asked) == history[2:4]
    assert log.append_new(history[4:], history[3].timestamp) == history[4:]
    assert read_from(log.path, 0)[0] == history


def test_a_line_that_ends_on_a_full_disk_comes_once_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = HostLog(tmp_path / "host-0.log")
    long, later, last = LogLine(stamp(0), "long"), LogLine(stamp(5000), "later"), LogLine(stamp(9000), "last")
    log.append_new([later], None, open=[long.timestamp])
    with monkeypatch.context() as full:
        full.setattr(logs, "write_whole", FULL)
        with pytest.raises(OSError, match="No space"):
            log.append_new([long, later], log.cursor.since)
    log = HostLog(log.path)
    with monkeypatch.context() as full:  # there is room for the lines, but not for the times of open ones
        full.setattr(logs, "write_private", FULL)
        assert log.append_new(engine_log([later, long], log.cursor.since), log.cursor.since) == [long]
    log = HostLog(log.path)
    assert log.append_new(engine_log([later, long, last], log.cursor.since), log.cursor.since) == [last]
    assert [line.text for line in read_from(log.path, 0)[0]] == ["later", "long", "last"]


# Steps of a host's log: milliseconds since the line before, how far the clock steps back then, and the text.
TEXTS = st.sampled_from(["a", "b", "step 1", "", b"\xff\xfe".decode(errors="surrogateescape")])
STEPS = st.lists(st.tuples(st.integers(0, 900), st.sampled_from([0, 0, 0, 0, 2_500, 60_000]), TEXTS), max_size=60)


@given(STEPS, st.integers(1, 4), st.booleans())
def test_lines_are_delivered_once_and_in_order_although_the_hosts_clock_steps_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, str]], lines_a_look: int, restarts: bool
) -> None:
    """A host whose clock is behind what was asked for gives its last lines, as observe.sh does."""
    tail, clock, history = 8, 100_000_000, []
    log = HostLog(tmp_path_factory.mktemp("log") / "host-0.log")
    delivered = []
    for number, (milliseconds, back, text) in enumerate(steps, 1):
        clock += milliseconds // lines_a_look + 1 - back
        history.append(LogLine(stamp(clock), text))
        if number % lines_a_look and number < len(steps):
            continue
        if restarts:
            log = HostLog(log.path)
        since = log.cursor.since
        is_behind = since is not None and stamp(clock)[:19] < since
        delivered += log.append_new(history[-tail:] if is_behind else engine_log(history, since))
    assert delivered == history
    assert read_from(log.path, 0)[0] == history


def test_a_page_that_ends_between_two_equal_lines_repeats_none() -> None:
    """The second seems open, because it was cut there."""
    cursor, at = Cursor(), "2026-01-01T00:00:00.5Z"
    twice = [LogLine(at, "line"), LogLine(at, "line")]
    assert cursor.advance(twice[:1], open=[at]) == twice[:1]
    assert cursor.advance([LogLine(at, "li" + CUT)]) == [], "a shorter page shows less of it"
    later = LogLine("2026-01-01T00:00:03.5Z", "line")
    assert cursor.advance([*twice, later]) == [twice[1], later]


def test_a_look_without_the_last_line_adds_what_comes_more_often_and_nothing_old() -> None:
    cursor, (first, last, new) = Cursor(), [LogLine(stamp(9000 + number), f"line {number}") for number in range(3)]
    assert cursor.advance([first, last]) == [first, last]
    assert cursor.advance([LogLine(stamp(1000), "old"), first, first, new]) == [first, new]


PART = 16  # bytes; Docker's are of 16 KiB


@dataclass
class Docker:
    """A container's log, as Docker's copier writes it and `docker logs --timestamps` prints it."""

    now: int = 0
    records: list[tuple[str, bytes]] = field(default_factory=list)
    buffers: list[bytes] = field(default_factory=lambda: [b"", b""])
    partial: list[str] = field(default_factory=lambda: ["", ""])  # times of the streams' open lines

    def write(self, stream: int, data: bytes) -> None:
        data = self.buffers[stream] + data
        while b"\n" in data[:PART] or len(data) >= PART:
            line, end, rest = data[:PART].partition(b"\n")
            self._store(stream, line, ends=bool(end))
            data = rest + data[PART:]
        self.buffers[stream] = data

    def close(self) -> None:
        for stream, rest in enumerate(self.buffers):
            if rest:
                self._store(stream, rest, ends=False)

    def _store(self, stream: int, content: bytes, *, ends: bool) -> None:
        self.now += 1
        time = self.partial[stream] or stamp(self.now)
        self.partial[stream] = "" if ends else time
        self.records.append((time, content + b"\n" * ends))

    def logs(self, since: str | None, tail: int | None) -> bytes:
        """Docker counts before it filters: a tail of 5,000 records may be full of parts of a line that was cut."""
        chosen = [record for record in self.records if since is None or record[0] >= since]
        return b"".join(time.encode() + b" " + content for time, content in chosen[-(tail or 0) :])


# What a program writes on a stream, the milliseconds until the next write, and whether then the log is read, and by a
# new process. Bytes that are not UTF-8, and times earlier than those of the log, are in it.
CONTENT = st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xc3\xa9", b"0" * 11, b"2025-01-01T00:00:00.000000000Z x"]))
WRITES = st.lists(st.tuples(st.integers(0, 1), CONTENT, st.sampled_from([0, 700, 5000]), st.booleans(), st.booleans()))


class OneHost(TpuVm):
    """The provider, whose scripts read a log in memory."""

    def __init__(self, docker: Docker, status: str) -> None:
        self.docker = docker
        self.head = json.dumps({"state": {"Status": status}, "created_on": "b", "boot": "b", "booted": 0})

    def _observe(self, worker: int, script: Any, patience: float = 0.0) -> tuple[Observation, LogWindow]:
        since, tail = script
        assert tail or not since or patience > 100, "the engine reads all lines before a time, which takes long"
        if tail and since and stamp(self.docker.now) < since:  # as observe.sh does while the clock is behind
            since = None
        data = self.docker.logs(since, tail)[: host_scripts.LOG_BYTES]
        return host_scripts.parse_observation(0, f"{self.head}\n{data.decode(errors='surrogateescape')}")


def read_all(docker: Docker, log: HostLog, status: str) -> None:
    """Does what the supervision does: reads page after page."""
    host, since = OneHost(docker, status), log.cursor.since
    for _ in range(1000):
        look = replace(host.observe(0, "demo", since), since=since)
        log.append_new(look.lines, since, look.open)
        since = next_page(look)
        if not since:
            return
    raise AssertionError("reading has not ended")


@given(WRITES, st.integers(2, 9), st.sampled_from([(80, 400), (1 << 20, 1 << 22)]))
def test_lines_of_two_streams_in_parts_are_delivered_once(
    tmp_path_factory: pytest.TempPathFactory, writes: list[Any], tail: int, limits: tuple[int, int]
) -> None:
    docker, log = Docker(), HostLog(tmp_path_factory.mktemp("log") / "host-0.log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container_output, "PART_BYTES", PART)
        patch.setattr(container_output, "LINE_BYTES", limits[0])
        patch.setattr(host_scripts, "LOG_BYTES", limits[1])
        patch.setattr(provider, "_TAIL", tail)
        patch.setattr(host_scripts, "observe_script", lambda _, since, tail=None, **__: (since, tail))
        for stream, content, milliseconds, look, restart in writes:
            docker.write(stream, b"".join(content))
            docker.now += milliseconds
            log = HostLog(log.path) if restart else log
            if look:
                read_all(docker, log, "running")
        docker.close()
        read_all(docker, log, "exited")
        read_all(docker, HostLog(log.path), "exited")
    expected = Counter[str]()
    for number in (0, 1):
        *lines, last = b"".join(b"".join(content) for stream, content, *_ in writes if stream == number).split(b"\n")
        expected.update(line.decode(errors="replace").rstrip("\r") for line in [*lines, *([last] if last else [])])
    delivered = Counter(line.text for line in read_from(log.path, 0)[0])
    cut, missing = list((delivered - expected).elements()), list((expected - delivered).elements())
    assert len(cut) == len(missing)
    assert limits[0] == 80 or not cut
    for text in cut:
        assert text.endswith(CUT)
        assert any(line.startswith(text.removesuffix(CUT).rstrip("\ufffd")) for line in missing)


def test_lines_in_the_last_records_come_after_a_clocks_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker, log = Docker(now=100_000), HostLog(tmp_path / "host-0.log")
    monkeypatch.setattr(provider, "_TAIL", 4)
    monkeypatch.setattr(host_scripts, "observe_script", lambda _, since, tail=None, **__: (since, tail))
    for lines in (b"1\n", b"2\n3\n4\n", b"5\n"):
        docker.write(0, lines)
        read_all(docker, log, "running")
        docker.now -= 40_000
    assert [line.text for line in read_from(log.path, 0)[0]] == list("12345")


def test_times_that_older_kubelets_print_between_parts_are_not_in_the_line() -> None:
    half = container_output.PART_BYTES - 1
    data = f"{stamp(1)} ".encode() + b"a" * half + f"\xc3{stamp(2)} ".encode("latin-1") + b"\xa9 end\n"
    assert read_log(data, kubelet_records, complete=False).lines == (LogLine(stamp(1), "a" * half + "é end"),)
