"""The scripts that run inside the containers of a run, the same with every provider, and what containers print: the
lines of progress, and whole lines out of what an engine printed of a container's log. Pure: bytes in, lines out.

Engines store a line longer than 16 KiB in parts, each as soon as it is full. Docker prints before each part the time of
the line's first part (moby#37681); parts of stdout and stderr may alternate, and at the end of a container each stream
may lack its last line end. Older kubelets print before each part its own time.

A line is delivered when it has ended, or its container has: what is delivered never changes later. Where more than
LINE_BYTES of the log have followed its beginning, a line is cut, CUT says so at its end, and the rest is left out.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import resources

from launcher.provider import LogLine
from training.machine import shift
from training.telemetry.progress_line import ProgressLine, parse


def _load_script(name: str) -> str:
    """Returns the text of container_scripts/NAME.sh without comment lines. Those at its top say what the script
    prints."""
    text = (resources.files(__package__) / f"container_scripts/{name}.sh").read_text(encoding="utf-8")
    return re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)


READ_PROGRESS, DUMP_STACKS = _load_script("read_progress"), _load_script("dump_stacks")
LINE_BYTES = 1 << 20
CUT = " [tpu-launch cut this line]"
PART_BYTES = 1 << 14
_PROGRESS, _MOST_PROCESSES = "progress ", 64
_TIME_BYTES = 31  # of a docker time, with the blank behind it
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[-+]\d\d:\d\d)) ")
_DOCKER_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) ")

_Open = dict[str, tuple[int, list[bytes]]]  # lines that have not ended, by time: where they begin, and their parts
_Records = Callable[[bytes, _Open], Iterator[tuple[str, bytes, bool]]]


def split_progress(output: str) -> tuple[tuple[ProgressLine, ...], str]:
    """Returns the parsed lines of progress that begin an output, and what follows them. Drops lines of progress that
    can't be parsed, and those after the first 64."""
    progress: list[ProgressLine] = []
    while output.startswith(_PROGRESS):
        line, _, output = output.partition("\n")
        if (parsed := parse(line.removeprefix(_PROGRESS))) and len(progress) < _MOST_PROCESSES:
            progress.append(parsed)
    return tuple(progress), output


@dataclass(frozen=True)
class LogWindow:
    """The lines in a piece of a log, and those that it leaves open."""

    lines: tuple[LogLine, ...] = ()  # in the order of their ends, which stays the same in later pieces
    open: Mapping[str, int] = field(default_factory=dict)  # bytes so far of each line that has not ended, by its time
    first: str = ""  # time of the first record; "" without any
    records: int = 0  # lines, and parts of lines


def docker_records(piece: bytes, begun: _Open) -> Iterator[tuple[str, bytes, bool]]:
    """Yields (time, content, whether it is the last) of each record in a piece of `docker logs --timestamps`: the bytes
    between two line ends. The time is RFC 3339, UTC, with nine digits of a second, or "" if the piece begins with none.
    A time inside the piece is docker's, and begins a record, if it follows a full part, is that of a line in `begun`,
    or is not earlier than the last one. Any other is the program's: it ends a record, and the next has the same
    time."""
    match = _TIME.match(piece)
    if match is None:
        yield "", piece, True
        return
    time, at = _utc(match[1]), match.end()
    if piece.find(b"Z ", at) >= 0:  # many times faster than the pattern
        for inner in _DOCKER_TIME.finditer(piece, at):
            other = inner[1].decode()
            begins = other >= time or other in begun or inner.start() - at == PART_BYTES
            # Else it is of the program, or of a line whose beginning is missing: count that as a record.
            yield time, piece[at : inner.start() if begins else inner.end()], False
            time, at = other if begins else time, inner.end()
    yield time, piece[at:], True


def kubelet_records(piece: bytes, _begun: _Open) -> Iterator[tuple[str, bytes, bool]]:
    """Yields the one record in a piece of `kubectl logs --timestamps`, as `docker_records` does, its parts joined."""
    match = _TIME.match(piece)
    parts, at = [], match.end() if match else 0
    while match and (inner := _TIME.match(piece, at + PART_BYTES)):
        parts.append(piece[at : inner.start()])
        at = inner.end()
    yield _utc(match[1]) if match else "", b"".join([*parts, piece[at:]]), True


def read_log(data: bytes, records: _Records, *, complete: bool) -> LogWindow:
    """Returns the whole lines of a piece of a log, and the times and sizes of open lines, which have not ended. Lines
    are cut (`CUT`) after LINE_BYTES, an open one, which then counts as whole, once more than that of the log follows
    its beginning. If the log is `complete`, all lines are whole. `records` is `docker_records` or `kubelet_records`."""
    lines: list[LogLine] = []
    begun: _Open = {}
    first, count, position = "", 0, 0
    pieces = data.split(b"\n")  # not splitlines(): progress bars write \r, text may hold U+2028
    for number, piece in enumerate(pieces):
        begin = position
        for time, content, is_last in records(piece, begun) if piece else ():
            first, count = first or time, count + 1
            ends = is_last and number < len(pieces) - 1
            if not ends or time in begun:
                begun.setdefault(time, (begin, []))[1].append(content)
            if ends:
                lines.append(_line(time, begun.pop(time)[1] if time in begun else [content]))
            begin += len(content) + _TIME_BYTES
        position += len(piece) + 1
    for time, (begin, parts) in list(begun.items()):
        if complete or len(data) - begin > LINE_BYTES:
            del begun[time]
            whole = parts if complete or len(parts) == 1 else parts[:-1]  # the last one may be truncated, in its time
            lines.append(_line(time, whole, cut=not complete))
    sizes = {time: sum(map(len, parts)) for time, (_, parts) in begun.items() if time}
    return LogWindow(tuple(lines), sizes, first, count)


def after(time: str) -> str:
    """Returns the time a nanosecond later."""
    head, _, fraction = time.removesuffix("Z").partition(".")
    seconds, rest = divmod(int(fraction.ljust(9, "0")) + 1, 10**9)
    return shift(f"{head}.{rest:09d}Z", timedelta(seconds=seconds))


def _line(time: str, parts: list[bytes], *, cut: bool = False) -> LogLine:
    """Returns a line made of these parts; longer than LINE_BYTES, or if `cut`, it is cut and ends with CUT."""
    data = b"".join(parts)
    cut = cut or len(data) > LINE_BYTES
    text = data[:LINE_BYTES].decode(errors="replace").rstrip("\r")
    return LogLine(time, text + CUT if cut else text)


def _utc(time: bytes) -> str:
    """Returns an RFC 3339 time in UTC with nine digits of a second, so that times compare as text."""
    text = time.decode()
    if len(text) == 30 and text[-1] == "Z":
        return text
    match = re.fullmatch(r"([-\dT:]+)(?:\.(\d+))?(Z|[-+]\d\d:\d\d)", text)
    assert match is not None
    second, fraction, zone = match.groups()
    if zone != "Z":
        second = datetime.fromisoformat(second + zone).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{second}.{(fraction or '').ljust(9, '0')}Z"
