"""The files of an image's build context: which they are, their hash, and a copy of them for the builder.

Only what can change an image counts: names, content, the executable bit, where a symbolic link points. Times, owners,
umask and the order of listing don't, so that two clones of a commit have the same hash.

Secrets and files of this machine alone (`LEFT_OUT`) never leave a user's folder, neither in a context nor in an
overlay.
"""

import contextlib
import functools
import hashlib
import io
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from launcher import home
from launcher.errors import BadInput

# A path inside the context (with "/"), and its source file on this machine.
Entry = tuple[str, Path]

_STATE = (
    *("**/.git", "**/.hg", "**/.svn", "**/.tpu-launch", "**/.venv", "**/venv", "**/node_modules", "**/.DS_Store"),
    *("**/__pycache__", "**/*.pyc", "**/.mypy_cache", "**/.ruff_cache", "**/.pytest_cache", "**/.ipynb_checkpoints"),
)
_CREDENTIALS = (
    *("**/*.env", "**/.env.*", "**/.envrc", "**/.netrc", "**/.git-credentials", "**/.pypirc", "**/.npmrc"),
    *("**/.ssh", "**/id_rsa", "**/id_dsa", "**/id_ecdsa", "**/id_ed25519", "**/*.key", "**/*.p12", "**/*.pfx"),
    *("**/.aws", "**/.azure", "**/.kube", "**/.docker/config.json", "**/.config/gcloud", "**/.boto", "**/.kaggle"),
    *("**/application_default_credentials.json", "**/*credentials*.json", "**/*service[-_]account*.json"),
    f"**/*-{'[0-9a-f]' * 12}.json",  # the name that Google's console gives a service account's key
    *("**/*[-_]key.json", "**/*key.pem", "**/client_secret*.json", "**/token.json", "**/*kubeconfig"),
    *("**/.cache/huggingface", "**/.huggingface"),
)
LEFT_OUT = (*_STATE, *_CREDENTIALS)
"""Files of a user's folder that never leave this machine, as .dockerignore patterns: state, caches, environment files
and credentials. Files that hold a private key don't either. A line `!PATTERN` of the folder's .dockerignore includes a
file all the same."""

# A key in PEM, in a file of its own or in JSON; or a service account's key, whatever its form.
_PRIVATE_KEY = re.compile(
    rb'-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\s|\\[rn])+(?:[\w+/]{16}|Proc-Type:)|"private_key"\s*:\s*"[^"]{16}'
)
_SEARCHED_BYTES = 64 * 2**10  # the largest file that is searched for a private key
_SHOWN = 8

# The parts of a .dockerignore pattern: wildcards, sets of characters, escaped characters, characters.
_TOKEN = re.compile(r"\*\*/|\*\*|\[.[^]]*\]|\\.|.", re.DOTALL)
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def tree(folder: Path, *, ignore: Sequence[str] = (), search_keys: bool = False) -> tuple[Entry, ...]:
    """Returns every regular file and symbolic link of a folder, sorted, but those that the .dockerignore patterns of
    `ignore` leave out. With `search_keys` also leaves out small files that hold a private key, unless a line `!PATTERN`
    of `ignore` includes them, and raises BadInput for what can't be looked at, which is otherwise left out. Raises
    BadInput when there is no such folder."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: there is no such folder to build an image from")
    is_ignored = _compile_ignore(ignore)
    keeps_some = any(line.lstrip().startswith("!") for line in ignore)  # then an ignored folder is searched too
    entries = []

    def path_of(file: Path) -> str:
        return file.relative_to(folder).as_posix()

    def refuse(error: OSError) -> None:
        """Raises BadInput for what can't be looked at, if `search_keys`, unless it is gone or ignored."""
        gone, path = isinstance(error, FileNotFoundError), path_of(Path(error.filename))
        if search_keys and not gone and not is_ignored(path):
            raise BadInput(f"{unreadable(error.filename, error)}; a line in .dockerignore leaves it out")

    def is_sent(file: Path) -> bool:
        """Returns whether a file or link is part of the context; False for a folder. Raises as `refuse`."""
        try:
            mode = file.lstat().st_mode
        except OSError as error:
            refuse(error)
            return False
        if is_ignored(path_of(file)) or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            return False  # pipes and sockets have no content, and reading one may never end
        return not (search_keys and _holds_private_key(file) and is_ignored(path_of(file), default=True))

    for root, folders, files in os.walk(folder, onerror=refuse):
        here = Path(root)
        inside = [here / name for name in (*files, *folders)]  # a link to a folder counts as a folder here
        entries += [(path_of(file), file) for file in inside if is_sent(file)]
        if not keeps_some:
            folders[:] = [name for name in folders if not is_ignored(path_of(here / name))]
    return tuple(sorted(entries))


def folder(path: Path, dockerfile: Path | None = None, *, with_credentials: bool = False) -> tuple[Entry, ...]:
    """Returns a user's folder as a build context, without `LEFT_OUT`, files with private keys, and what the ignore file
    leaves out: `<Dockerfile>.dockerignore` beside `dockerfile`, else the folder's .dockerignore, if there is one
    (https://docs.docker.com/build/concepts/context/#filename-and-location). Raises BadInput without the folder, or for
    an unusable ignore file. `with_credentials`: include what it would leave out only because it holds credentials."""
    patterns = [line for line in left_out_of(path) if not (with_credentials and line in _CREDENTIALS)]
    ignore_files = [path / ".dockerignore"]
    if dockerfile is not None:
        ignore_files.insert(0, dockerfile.with_name(f"{dockerfile.name}.dockerignore"))
    ignore_file = next((file for file in ignore_files if file.is_file()), None)
    if ignore_file is None:
        return tree(path, ignore=patterns, search_keys=not with_credentials)
    try:
        lines = (*ignore_file.read_text(encoding="utf-8-sig").splitlines(), "/.dockerignore", "/*.dockerignore")
        return tree(path, ignore=(*patterns, *lines), search_keys=not with_credentials)
    except (OSError, UnicodeDecodeError, re.error) as error:
        raise BadInput(f"{ignore_file}: can't be used: {error}") from None


def report_credentials(path: Path, dockerfile: Path | None, say: Callable[[str], None]) -> None:
    """Says in one line which files the function `folder` leaves out of `path` only because they hold credentials;
    nothing if there are none. Raises as `folder`."""
    wanted = folder(path, dockerfile, with_credentials=True)
    if names := [name for name, _ in sorted(set(wanted) - set(folder(path, dockerfile)))]:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        say(f"{path}: left out as credentials: {shown}; a line !PATH in .dockerignore includes a file")


def left_out_of(folder: Path) -> tuple[str, ...]:
    """Returns patterns: `LEFT_OUT`, and the launcher's own folder if it is inside this one, whatever its name."""
    state = home.root().resolve()
    if not state.is_relative_to(folder.resolve()) or state == folder.resolve():
        return LEFT_OUT
    below = state.relative_to(folder.resolve()).as_posix()
    return (*LEFT_OUT, "/" + re.sub(r"[*?\[\\]", r"\\\g<0>", below))


def _holds_private_key(path: Path) -> bool:
    """Returns whether a file of 64 KiB at most, or one that a link points to, holds a private key; False if it can't be
    read."""
    try:
        small = path.is_file() and path.stat().st_size <= _SEARCHED_BYTES
        return small and _PRIVATE_KEY.search(path.read_bytes()) is not None
    except OSError:
        return False


def hash_files(entries: Iterable[Entry]) -> dict[str, str]:
    """Reads each entry once and returns `hash_file` of each by path, sorted. Raises as `open_entry`."""
    hashes = {}
    for path, source in sorted(entries):
        with open_entry(source) as (kind, file):
            hashes[path] = hash_file(kind, file)
    return hashes


def hash_file(kind: bytes, file: io.BufferedIOBase) -> str:
    """Reads a file in blocks, as it may be larger than memory. Returns the SHA-256 of its kind and its content, as
    `open_entry` yields them."""
    return hashlib.file_digest(file, lambda: hashlib.sha256(kind + b"\0")).hexdigest()


def assemble(entries: Iterable[Entry], destination: Path) -> None:
    """Copies the entries, links as links, into a new folder, with the modes that `hash_file` counts. Raises OSError."""
    destination.mkdir(mode=0o755, parents=True)
    for path, source in entries:
        target = destination / path
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            shutil.copyfile(source, target)
            target.chmod(0o755 if is_executable(source) else 0o644)


@contextlib.contextmanager
def open_entry(source: Path) -> Iterator[tuple[bytes, io.BufferedIOBase]]:
    """Yields an entry's kind ("file", "program" if executable, "link") and its content as an open file, of a link its
    target's path. Raises BadInput for one that can't be read, and for any OSError of the block."""
    try:
        if source.is_symlink():
            yield b"link", io.BytesIO(os.fsencode(os.readlink(source)))
            return
        with open(source, "rb") as file:
            yield b"program" if is_executable(source) else b"file", file
    except OSError as error:
        raise unreadable(source, error) from None


def unreadable(source: str | Path, error: OSError) -> BadInput:
    """Returns the error for a file that an image needs and that can't be read."""
    return BadInput(f"{source}: can't be read for the image: {error.strerror}")


def is_executable(source: Path) -> bool:
    """Returns whether a file's owner may execute it."""
    return bool(source.stat().st_mode & 0o100)


def _compile_ignore(lines: Sequence[str]) -> Callable[..., bool]:
    """Returns a predicate of a path: whether .dockerignore lines leave it out. The last pattern that matches the path
    or one of its folders decides; without one, the predicate's `default`, which is False unless given.
    https://docs.docker.com/build/concepts/context/#dockerignore-files"""
    rules = []
    for line in lines:
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keep = pattern.startswith("!")
        cleaned = os.path.normpath(pattern.removeprefix("!").strip()).strip("/")
        if cleaned != ".":
            rules.append((_compile_pattern(cleaned), keep))

    def is_ignored(path: str, default: bool = False) -> bool:
        """Returns whether a path is left out; `default` if no line matches."""
        return next((not keep for expression, keep in reversed(rules) if expression.fullmatch(path)), default)

    return is_ignored


@functools.cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression of a .dockerignore pattern (without ! and outer /), for `fullmatch`: of a path
    that it names, or one below."""

    def translate(token: re.Match[str]) -> str:
        """Returns the regular expression of one part of the pattern."""
        text = token[0]
        return _WILDCARDS.get(text) or (text if len(text) > 2 else re.escape(text[-1]))  # a set, or one character

    return re.compile(_TOKEN.sub(translate, pattern) + "(?:/.*)?", re.DOTALL)
