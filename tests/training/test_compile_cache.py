"""The folder of compiled programs: its bound, and what is damaged or can't be written. tests/virtual_tpu uses it."""

import ctypes
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.backends import compile_cache
from training.backends.compile_cache import MAGIC, ProgramStore, open_cache

KEYS = [digit * 64 for digit in "0123456789"]
OVERHEAD = len(MAGIC) + 32  # bytes of an entry beside its program
TPU = {"PJRT_DEVICE": "TPU"}


@pytest.fixture
def said() -> list[str]:
    return []


def store(folder: Path, said: list[str], largest_bytes: int = 1000) -> ProgramStore:
    return ProgramStore(folder / "programs", said.append, largest_bytes)


def age(folder: Path, key: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / "programs" / key, (then, then))


def test_an_entry_is_read_once_until_it_is_proved(tmp_path: Path, said: list[str]) -> None:
    """And neither read nor replaced by others meanwhile, which say so; proved, it is as before."""
    first, second = store(tmp_path, said), store(tmp_path, said)
    first.write(KEYS[0], b"program")
    assert first.read(KEYS[0]) == b"program"
    second.write(KEYS[0], b"compiled again")
    assert second.read(KEYS[0]) is None
    (line,) = said
    assert str(tmp_path / "programs" / f"{KEYS[0]}.unproven") in line
    first.prove(KEYS[0])
    assert second.read(KEYS[0]) == b"program"


def test_the_entries_that_were_not_used_for_longest_are_removed(tmp_path: Path, said: list[str]) -> None:
    programs = store(tmp_path, said, 3 * (100 + OVERHEAD))
    for number in range(3):
        programs.write(KEYS[number], bytes(100))
        age(tmp_path, KEYS[number], 300 - 100 * number)
    assert programs.read(KEYS[0]) is not None, "a use, after which it is the youngest"
    programs.prove(KEYS[0])
    programs.write(KEYS[3], bytes(100))
    assert sorted(path.name for path in (tmp_path / "programs").iterdir()) == [KEYS[0], KEYS[2], KEYS[3]]
    programs.write(KEYS[4], bytes(301 + 2 * OVERHEAD))
    assert programs.read(KEYS[4]) is None, "larger than the bound"
    assert programs.read(KEYS[3]) is not None, "and nothing had to go for it"


def test_files_of_others_stay_and_do_not_count(tmp_path: Path, said: list[str]) -> None:
    programs = store(tmp_path, said, 2 * (10 + OVERHEAD))
    programs.write(KEYS[0], bytes(10))
    (tmp_path / "programs" / "README").write_bytes(bytes(5000))
    programs.write(KEYS[1], bytes(10))
    assert (tmp_path / "programs" / "README").exists()
    assert programs.read(KEYS[0]) is not None


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "foreign"])
def test_a_damaged_entry_is_as_good_as_none_and_is_removed(tmp_path: Path, said: list[str], damage: str) -> None:
    programs = store(tmp_path, said)
    programs.write(KEYS[0], b"program" * 20)
    path = tmp_path / "programs" / KEYS[0]
    content = path.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    damaged = {"cut": content[:-1], "bit": flipped, "empty": b"", "foreign": b"another program's cache"}
    path.write_bytes(damaged[damage])
    assert programs.read(KEYS[0]) is None
    assert not path.exists()
    assert not said


def test_what_a_killed_writer_left_is_removed_after_an_hour(tmp_path: Path, said: list[str]) -> None:
    programs = store(tmp_path, said)
    programs.write(KEYS[0], b"program")
    for name in (f".{KEYS[1]}.old", f".{KEYS[2]}.new"):
        (tmp_path / "programs" / name).write_bytes(b"half")
    age(tmp_path, f".{KEYS[1]}.old", 4000)
    programs.write(KEYS[3], b"program")
    assert {path.name for path in (tmp_path / "programs").iterdir()} == {KEYS[0], KEYS[3], f".{KEYS[2]}.new"}


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "programs").write_text("a file")
    programs = store(tmp_path, said)
    for key in KEYS:
        programs.write(key, b"program")
        assert programs.read(key) is None
    (line,) = said
    assert str(tmp_path / "programs") in line


def test_there_is_a_cache_only_on_tpus_and_where_a_folder_is_named(tmp_path: Path, said: list[str]) -> None:
    folder = {"TPU_LAUNCH_COMPILE_CACHE": str(tmp_path)}
    assert open_cache(TPU, "/nowhere/libtpu.so", "test", said.append) is None
    assert open_cache({**folder, "PJRT_DEVICE": "CPU"}, "/nowhere/libtpu.so", "test", said.append) is None
    assert not said


def test_a_module_has_one_key_in_whatever_order_its_hints_are_written() -> None:
    x, y, other = (b"\n\x0f\n\x06grad_%s\x12\x05false" % name for name in (b"x", b"y", b"z"))
    assert compile_cache.sort_hints(b"a" + y + x + b"b" + other + x + y) == b"a" + x + y + b"b" + other + x + y
    assert compile_cache.sort_hints(y + other + x) == y + other + x


@pytest.mark.parametrize(
    ("library", "reason"),
    [(None, "does not say where"), ("/nowhere/libtpu.so", "/nowhere/libtpu.so"), ("libc.so.6", "GetPjrtApi")],
)
def test_a_missing_table_is_only_a_warning(tmp_path: Path, said: list[str], library: str | None, reason: str) -> None:
    assert open_cache({**TPU, "TPU_LAUNCH_COMPILE_CACHE": str(tmp_path)}, library, "test", said.append) is None
    (line,) = said
    assert reason in line


def test_a_table_of_unknown_version_is_kept(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    head = struct.pack("<4q", 520, 0, 24, 0) + struct.pack("<2i", 1, 0)  # version 1.0
    table = ctypes.create_string_buffer(head + bytes(60 * 8), 40 + 60 * 8)
    plugin = SimpleNamespace(GetPjrtApi=ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(table)))
    monkeypatch.setattr(compile_cache.ctypes, "CDLL", lambda _path: plugin)
    assert compile_cache.install(Path("plugin.so"), store(tmp_path, said), "test") is None
    assert ctypes.string_at(ctypes.addressof(table) + 40, 60 * 8) == bytes(60 * 8)
