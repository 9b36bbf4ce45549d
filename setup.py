"""What pyproject.toml can't say: a build records the commit that it was made from, for `tpu-launch --version`.

The commit is in `launcher/commit.txt` of the wheel and of the source distribution. A build without git (from an
unpacked source distribution) takes over the file that it finds; without both there is no file, and the version has no
commit.
"""

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
COMMIT_FILE = Path("launcher") / "commit.txt"


def current_commit() -> str | None:
    """The checkout's commit, with "-dirty" when files differ from it; None outside a checkout or without git."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return None
    command = [git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def write_commit(target: Path) -> None:
    """Writes the commit file below `target`, a tree that is being built."""
    commit = current_commit()
    if commit is None and (ROOT / COMMIT_FILE).is_file():
        commit = (ROOT / COMMIT_FILE).read_text(encoding="utf-8").strip()
    if commit is not None:
        (target / COMMIT_FILE).write_text(commit + "\n", encoding="utf-8")


class BuildWithCommit(build_py):
    """Builds the packages and adds the commit file."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))


class SdistWithCommit(sdist):
    """Makes a source distribution with the commit file."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
