"""The installed version, the commit it was built from, and the files installed beside the package.

A wheel has `launcher/commit.txt` (written by setup.py), and examples and images below its `share/tpu-launch`. A source
checkout has them itself.
"""

import importlib.metadata
import shutil
from pathlib import Path

from launcher import shell
from launcher.errors import CommandTimeout, LaunchError

_PACKAGE = Path(__file__).resolve().parent


def version() -> str:
    """Returns, for example, "0.1.0 (commit 1a2b3c4d5e6f)"; only the number when the commit is not known."""
    number = importlib.metadata.version("tpu-launch")
    commit = _commit()
    return f"{number} (commit {commit})" if commit else number


def metadata_file() -> Path:
    """Returns the path of this installation's METADATA, which holds its version. Raises LaunchError without one."""
    for file in importlib.metadata.files("tpu-launch") or ():
        if file.name == "METADATA":
            return Path(str(file.locate()))
    raise LaunchError("METADATA is missing from this installation: install tpu-launch again")


def example(name: str) -> Path:
    """Returns the path of an example file: examples/NAME of the current folder if it exists, else the installed one,
    which may be missing. Raises LaunchError if the installation has no examples at all."""
    local = Path("examples") / name
    return local if local.is_file() else shared_folder("examples") / name


def shared_folder(name: str) -> Path:
    """Returns the folder `name` ("images" or "examples") of the checkout, if the code runs from one, else of the
    installation. Raises LaunchError if an installation lacks it."""
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return checkout / name
    marker = "share/tpu-launch/"
    # The installer's own list of files: it knows where a virtual environment, --user and --target put them.
    for file in importlib.metadata.files("tpu-launch") or ():
        base, found, inner = file.as_posix().partition(marker)
        if found and inner.startswith(f"{name}/"):
            share = importlib.metadata.distribution("tpu-launch").locate_file(base + marker)
            return Path(str(share)).resolve() / name
    raise LaunchError(f"{marker}{name} is missing from this installation: install tpu-launch again")


def _commit() -> str | None:
    """Returns the commit recorded at the build, else what git says of the checkout ("-dirty" if changed), else None."""
    recorded = _PACKAGE / "commit.txt"
    if recorded.is_file():
        return recorded.read_text(encoding="utf-8").strip()
    git = shutil.which("git")
    if git is None or not (_PACKAGE.parent / ".git").exists():
        return None
    command = [git, "-C", str(_PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        answer = shell.run(command, timeout=20.0)
    except CommandTimeout:  # a slow disk
        return None
    return answer.stdout.strip() if answer.ok else None
