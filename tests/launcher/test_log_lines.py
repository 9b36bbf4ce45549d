"""Claims about lines that an engine stores in parts: each is delivered once and whole, whenever the log is read."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import log_lines
from launcher.log_lines import CUT, LogWindow, kubelet_records, read_log
from launcher.provider import LogLine, Observation
from launcher.run.logs import HostLog, next_page, read_from
from launcher.tpu_vm import host_output, host_scripts, provider
from launcher.tpu_vm.provider import TpuVm
from tests.launcher.test_logs import stamp

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

    def close(self, stream: int) -> None:
        if self.buffers[stream]:
            self._store(stream, self.buffers[stream], ends=False)

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
        data = self.docker.logs(since, tail)[: host_output.LOG_BYTES]
        return host_output.parse_observation(0, f"{self.head}\n{data.decode(errors='surrogateescape')}")


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
def test_lines_of_two_streams_in_parts_are_delivered_once(  # type: ignore[no-untyped-def]
    tmp_path_factory, writes: list[tuple[int, list[bytes], int, bool, bool]], tail: int, limits: tuple[int, int]
) -> None:
    docker, log = Docker(), HostLog(tmp_path_factory.mktemp("log") / "host-0.log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "PART_BYTES", PART)
        patch.setattr(log_lines, "LINE_BYTES", limits[0])
        patch.setattr(host_output, "LOG_BYTES", limits[1])
        patch.setattr(provider, "_TAIL", tail)
        patch.setattr(host_scripts, "observe_script", lambda _, since, tail=None, **__: (since, tail))
        for stream, content, milliseconds, look, restart in writes:
            docker.write(stream, b"".join(content))
            docker.now += milliseconds
            log = HostLog(log.path) if restart else log
            if look:
                read_all(docker, log, "running")
        docker.close(0)
        docker.close(1)
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


def test_lines_that_fill_the_last_records_come_although_the_hosts_clock_stepped_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker, log = Docker(now=100_000), HostLog(tmp_path / "host-0.log")
    monkeypatch.setattr(provider, "_TAIL", 4)
    monkeypatch.setattr(host_scripts, "observe_script", lambda _, since, tail=None, **__: (since, tail))
    for lines in (b"1\n", b"2\n3\n4\n", b"5\n"):
        docker.write(0, lines)
        read_all(docker, log, "running")
        docker.now -= 40_000
    assert [line.text for line in read_from(log.path, 0)[0]] == list("12345")


def test_times_that_older_kubelets_print_between_parts_are_not_in_the_line() -> None:
    half = log_lines.PART_BYTES - 1
    data = f"{stamp(1)} ".encode() + b"a" * half + f"\xc3{stamp(2)} ".encode("latin-1") + b"\xa9 end\n"
    assert read_log(data, kubelet_records, complete=False).lines == (LogLine(stamp(1), "a" * half + "é end"),)
