"""Compiled programs on the host's disk, for a plugin of PJRT (libtpu): a later start need not compile them again.

A plugin is a library with one function, `GetPjrtApi`, which returns a table of functions
(https://github.com/openxla/xla/blob/main/xla/pjrt/c/pjrt_c_api.h). The table belongs to the library: every caller that
loads the same file gets the same table. So `open_cache`, called before the framework opens its devices, puts a function
into the table that looks into the store first, and calls the plugin's own if the program is not there, or can't be
serialised or loaded. JAX's own cache serialises and loads programs by the same three functions of libtpu.

The store is a folder: one file an entry, named by its key.

    <64 hexadecimal digits>        magic, SHA-256 of the program's bytes, the bytes
    <the same>.unproven            empty: the entry was loaded, and has had no result yet
    .<name>.<random>               an entry that is being written

Nothing here may end a run: what can't be read is not there, what can't be written is not kept. An entry appears whole,
by a rename, so processes may share a folder. One whose bytes are not those that were written is removed. What is in the
folder beside entries stays untouched. A program may load and then fail or hang when it runs, in every start that loads
it. So an entry is unproven from its load to its first result, and a later start neither loads nor replaces an unproven
one."""

import contextlib
import ctypes
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from ctypes import c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

# The environment says where the cache is; the launcher sets both (`run.compile_cache_gb`).
FOLDER_VARIABLE = "TPU_LAUNCH_COMPILE_CACHE"  # a folder on the host's disk; no cache if it is not set
GB_VARIABLE = "TPU_LAUNCH_COMPILE_CACHE_GB"  # what the folder may hold
DEFAULT_GB = 4.0

# Places in the table, from 0. The table only ever grew at its end since version 0.40; the oldest that is known here.
_ERROR_DESTROY, _ERROR_MESSAGE, _PLATFORM_VERSION, COMPILE = 0, 1, 14, 20
EXECUTABLE_DESTROY, _SERIALIZE, _GET_EXECUTABLE, _DESERIALIZE = 40, 49, 51, 56
_MAJOR, _OLDEST_MINOR = 0, 54

# Words of the arguments of COMPILE: size, extensions, client, program, options and their size, executable (filled).
COMPILE_WORDS, _EXECUTABLE = 7, 6
PROGRAM_WORDS = 6  # of a program: size, extensions, code and its size, format and its size

# What decides, beside the program and its options, what it is compiled to.
_VARIABLES = (
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_ACCELERATOR_TYPE", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_TOPOLOGY_WRAP", "TPU_TOPOLOGY_ALT", "TPU_WORKER_ID", "TPU_MEGACORE",
)  # fmt: skip

# Entries of an instruction's map of frontend attributes, as xla::Einsum makes them, in a serialized module.
_HINT = rb"\n.\n\x06grad_[xy]\x12.(?:true|false)"
_HINTS = re.compile(b"(?:%s)+" % _HINT)

MAGIC = b"tpu-launch compiled program 1\n"
_ENTRY = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\..*")
_ABANDONED_SECONDS = 3600.0  # since an unfinished entry was written to
_DIGEST_BYTES = hashlib.sha256().digest_size


def sort_hints(code: bytes) -> bytes:
    """Returns a module's code with each einsum's attributes sorted: their order, which differs between processes, would
    give one program several keys."""
    return _HINTS.sub(lambda found: b"".join(sorted(re.findall(_HINT, found[0]))), code)


class ProgramStore:
    """A folder of compiled programs, created when the first is written."""

    def __init__(self, folder: Path, warn: Callable[[str], None], largest_bytes: int) -> None:
        """`warn` gets a line for an unproven program, one for the first problem; `largest_bytes`: of all entries."""
        self._folder, self._warn, self._largest_bytes = folder, warn, largest_bytes

    def read(self, key: str) -> bytes | None:
        """Returns the program with this key, notes its use, and marks it as unproven until `prove`. Returns None if
        there is none or it can't be marked, or, with a warning, if a mark is there already. Removes a damaged entry."""
        path, mark = self._folder / key, self._mark(key)
        if mark.exists():
            self._warn(
                f"an earlier start loaded a compiled program and had no result of it: it is compiled again, and not "
                f"kept as long as there is {mark}"
            )
            return None
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            head, program = content[: len(MAGIC) + _DIGEST_BYTES], content[len(MAGIC) + _DIGEST_BYTES :]
            if head == MAGIC + hashlib.sha256(program).digest():
                os.utime(path)  # the time of its last use
                mark.touch()
                return program
            self.remove(key)
        return None

    def write(self, key: str, program: bytes) -> None:
        """Keeps a program, unless it alone exceeds the bound or is marked as unproven. Removes the least recently used
        entries as long as all together exceed the bound. Warns, once, if the folder can't be written."""
        content = MAGIC + hashlib.sha256(program).digest() + program
        if len(content) > self._largest_bytes or self._mark(key).exists():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(content))
            descriptor, name = tempfile.mkstemp(prefix=f".{key}.", dir=self._folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                os.replace(name, self._folder / key)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            self.warn_once(f"the compiled program is not kept for the next start: {self._folder}: {error.strerror}")

    def warn_once(self, problem: str) -> None:
        """Warns of a problem in one line; drops all later warnings of this store, those of `read` too."""
        with contextlib.suppress(Exception):  # as when stderr is closed
            self._warn(" ".join(problem.split()))
        self._warn = lambda _message: None  # it was shown

    def prove(self, key: str) -> None:
        """Removes the mark of an entry that was read, as its program has had a result; ignores failures."""
        with contextlib.suppress(OSError):
            self._mark(key).unlink()

    def _mark(self, key: str) -> Path:
        """Returns the file that marks this entry as unproven."""
        return self._folder / f"{key}.unproven"

    def remove(self, key: str) -> None:
        """Removes an entry and its mark; ignores failures."""
        self.prove(key)
        with contextlib.suppress(OSError):
            (self._folder / key).unlink()

    def _make_room(self, size: int) -> None:
        """Removes unfinished files an hour old, and the least recently used entries until `size` bytes more are within
        the bound. Raises OSError if the folder can't be listed."""
        entries = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another process removed it
                status = path.stat()
                if _UNFINISHED.fullmatch(path.name) and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
                elif _ENTRY.fullmatch(path.name):
                    entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(entry_size for _, entry_size, _ in entries)
        for _, entry_size, path in sorted(entries):
            if total + size <= self._largest_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= entry_size


def words_at(address: int, count: int) -> Any:
    """Returns `count` words of 8 bytes at an address, to read and to change in place."""
    return (c_uint64 * count).from_address(address)


PluginFunction = ctypes.CFUNCTYPE(c_void_p, c_void_p)  # a pointer to arguments -> a PJRT_Error or none
_KEPT: list[object] = []  # functions that a plugin's table points to, to the end of the process


class PluginTable:
    """A plugin's functions, called by their places. Arguments of a function are words of 8 bytes: their size, their
    extensions, what is given, and what the function fills."""

    def __init__(self, library: str) -> None:
        """Loads a plugin, for good. Raises OSError, and AttributeError if the file is no plugin."""
        plugin = ctypes.CDLL(library)
        plugin.GetPjrtApi.restype = c_void_p
        self.address: int = plugin.GetPjrtApi()
        version = words_at(self.address, 5)[4]
        self.major, self.minor = version & 0xFFFFFFFF, version >> 32

    def function(self, place: int) -> Callable[[int], int | None]:
        """Returns the plugin's function number `place`, from 0: the address of its arguments -> that of an error or
        None."""
        pointer = words_at(self.address, 6 + place)[5 + place]
        assert pointer, f"PJRT: no function at {place}"
        return PluginFunction(pointer)

    def replace(self, place: int, function: Callable[[int], int | None]) -> None:
        """Puts a function into the table as number `place`, for all callers in this process, to its end."""
        words_at(self.address, 6 + place)[5 + place] = keep_function(function)

    def call(self, place: int, *given: int | bytes, gives: int = 0) -> list[int]:
        """Calls function number `place` with `given` (bytes: their address), and returns the `gives` words of its
        arguments after these. Raises PluginError if it fails."""
        error, results = self._run(place, given, gives)
        if error:
            _, (message, size) = self._run(_ERROR_MESSAGE, (error,), 2)
            text = ctypes.string_at(message, size).decode(errors="replace")
            self._run(_ERROR_DESTROY, (error,), 0)
            raise PluginError(text)
        return results

    def _run(self, place: int, given: tuple[int | bytes, ...], gives: int) -> tuple[int | None, list[int]]:
        """Calls a function as `call`. Returns the address of its error, which the caller must destroy, or None, and the
        words that it may have filled."""
        count = 2 + len(given)
        words = (c_uint64 * (count + gives))(8 * (count + gives), 0, *map(address_of, given))
        return self.function(place)(ctypes.addressof(words)), words[count:]


def keep_function(function: Callable[[int], int | None]) -> int:
    """Returns the address of a new C function that calls `function`, to the end of the process."""
    _KEPT.append(PluginFunction(function))
    return address_of(_KEPT[-1])


def address_of(value: Any) -> int:
    """Returns the address of bytes or of a C function, valid as long as the caller keeps them; an integer as it is."""
    return value if isinstance(value, int) else ctypes.cast(value, c_void_p).value or 0


class PluginError(Exception):
    """An error that the plugin reported."""


class ProgramCache:
    """The function that compiles, with the store before it."""

    def __init__(self, table: PluginTable, store: ProgramStore, identity: str) -> None:
        """Changes nothing in `table`, the plugin's. `identity`: versions, a part of every key."""
        self._table, self._store, self._identity = table, store, identity
        self._compile = table.function(COMPILE)
        self._interrupt: BaseException | None = None  # that came in `compile`, a callback that can't raise it
        self._proofs: list[Callable[[], None]] = []
        self.loaded = 0  # programs from the store

    def take_proofs(self) -> list[Callable[[], None]]:
        """Returns functions that mark the programs loaded since the last call as proven: call each once its program has
        given a result. Raises an interrupt that came while a program was compiled."""
        if self._interrupt:
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt
        proofs, self._proofs = self._proofs, []
        return proofs

    def compile(self, address: int) -> int | None:
        """Replaces PJRT_Client_Compile, whose arguments are at this address. Returns the plugin's error, None without
        one. An interrupt (Ctrl-C, a notebook's button) does not end it: it tries again until there is a program or an
        error of the plugin, and `take_proofs` raises the interrupt."""
        arguments = words_at(address, COMPILE_WORDS)
        arguments[_EXECUTABLE] = 0
        while True:
            try:
                return self._load_or_compile(arguments, address)
            except BaseException as error:
                self._interrupt = error
                if arguments[_EXECUTABLE]:
                    return None

    def _load_or_compile(self, arguments: Any, address: int) -> int | None:
        """Fills in the executable in `arguments`, the words at `address`: loads it from the store, to be proven by
        `take_proofs`, or compiles and keeps it. Returns the plugin's error, None without one. Warns of an error of the
        cache, once; one of reading or loading removes the entry. Raises only interrupts."""
        key, client = None, arguments[2]
        try:
            key = self._key(arguments)
            program = self._store.read(key)
            if program is not None:
                # After the executable come options in place of those in the program: none.
                arguments[_EXECUTABLE] = self._table.call(_DESERIALIZE, client, program, len(program), gives=3)[0]
                self.loaded += 1
                self._proofs.append(partial(self._store.prove, key))
                return None
        except Exception as error:  # a cache may not end a run: the program is compiled
            if key:
                self._store.remove(key)
            self._store.warn_once(f"the cache of compiled programs fails, so a program is compiled: {error}")
        except BaseException:
            if key:
                self._store.prove(key)  # it was not run
            raise
        failure = self._compile(address)
        if not failure and key:
            try:
                self._store.write(key, self._serialize(arguments[_EXECUTABLE]))
            except Exception as error:  # as above
                self._store.warn_once(f"the compiled program is not kept for the next start: {error}")
        return failure

    def _key(self, arguments: Any) -> str:
        """Returns a program's key, 64 hex digits: a hash of versions, _VARIABLES, options, code. Raises PluginError."""
        _, _, client, program, *_ = arguments
        version = self._table.call(_PLATFORM_VERSION, client, gives=2)
        code, options = read_program(arguments)
        parts = (
            self._identity.encode(),
            ctypes.string_at(*version),
            *(f"{name}={os.environ.get(name)}".encode() for name in _VARIABLES),
            options,
            ctypes.string_at(*words_at(program, PROGRAM_WORDS)[4:]),  # the code's format
            sort_hints(code),
        )
        digest = hashlib.sha256()
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def _serialize(self, loaded: int) -> bytes:
        """Returns the bytes of a loaded executable, and frees the plugin's copy. Raises PluginError."""
        [executable] = self._table.call(_GET_EXECUTABLE, loaded, gives=1)
        try:
            *content, serialized, free = self._table.call(_SERIALIZE, executable, gives=4)
            try:
                return ctypes.string_at(*content)
            finally:
                ctypes.CFUNCTYPE(None, c_void_p)(free)(serialized)
        finally:
            self._table.call(EXECUTABLE_DESTROY, executable)


def read_program(arguments: Any) -> tuple[bytes, bytes]:
    """Returns code and options of the program in the arguments of PJRT_Client_Compile."""
    _, _, _, program, *options, _ = arguments
    return ctypes.string_at(*words_at(program, PROGRAM_WORDS)[2:4]), ctypes.string_at(*options)


def open_cache(
    environment: Mapping[str, str], library: str | None, identity: str, warn: Callable[[str], None]
) -> ProgramCache | None:
    """Puts a cache in front of the compiler of this process and returns it. Returns None on CPUs (their clients are no
    plugins, and can't load what they compiled) or without TPU_LAUNCH_COMPILE_CACHE; with a warning, if there can be
    none. Call it before the devices are opened. `environment`: has the cache's folder under that name, and its bound in
    GB, 4 if unset, under TPU_LAUNCH_COMPILE_CACHE_GB; `library`: the file of the plugin that the framework will load,
    None if unknown; `identity`: versions that decide how a program is compiled, beside the plugin's own; `warn`: called
    with a line if there can be no cache, if it fails, or if an entry is unproven."""
    folder = environment.get(FOLDER_VARIABLE)
    if not folder or environment.get("PJRT_DEVICE") != "TPU":
        return None
    problem = "the framework does not say where its TPU library is"
    if library:
        try:
            store = ProgramStore(Path(folder), warn, round(1e9 * float(environment.get(GB_VARIABLE) or DEFAULT_GB)))
            table = PluginTable(library)
            if table.major == _MAJOR and table.minor >= _OLDEST_MINOR:
                cache = ProgramCache(table, store, f"{identity}\n{table.minor}")
                table.replace(COMPILE, cache.compile)
                return cache
            problem = f"{library} is of another version"
        except (OSError, ValueError, OverflowError, AttributeError) as error:  # "inf" GB; a library without a table
            problem = str(error)
    warn(f"compiled programs are not kept for the next start: {problem}")
    return None
