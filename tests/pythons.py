"""Other versions of Python, for tests that install into an environment of one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def find_python(version: str) -> str:
    """Returns what `uv venv --python` takes: a program on the PATH or of pyenv, or the version to download."""
    if version == HERE:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    for candidate in (shutil.which(f"python{version}"), *map(str, installed)):
        # One of pyenv's shims may be there for a version that is not switched on.
        if candidate and subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    return version
