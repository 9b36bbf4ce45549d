"""Whether a simulator finds the defects that are known: `python -m tests.simulation.sensitivity --side trainer
[--lives 20000] [NAME...]`.

Each file of <side>/undone/ takes one protection away (a patch that `git apply` takes). It is applied to a copy of the
tree, where lives are played until a promise breaks. Printed is a table; the exit code is 1 when fewer than 90 % are
found.

A patch may begin with a line "Life N": a life that broke a promise when somebody looked. It is played first, so that
what it took long to find is found again in a moment; where it holds, all lives are played, as without the line.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.simulation.__main__ import sides

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("launcher", "training", "tests", "pyproject.toml")
GOAL = 0.9


def patches(side: str) -> list[Path]:
    """The protections that can be taken away."""
    return sorted((ROOT / "tests" / "simulation" / side / "undone").glob("*.patch"))


def check(patch: Path) -> str:
    """Why a patch does not apply to the tree; "" when it does."""
    done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)
    return done.stderr.strip()


def copy_tree(folder: Path) -> None:
    """The files of the tree that git knows or would add, as they are."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *COPIED]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())


def known_life(patch: Path) -> int | None:
    """The life that a patch names."""
    match = re.match(r"Life (\d+)\n", patch.read_text())
    return int(match[1]) if match else None


def find(side: str, patch: Path, lives: int) -> tuple[int | None, str]:
    """How many lives it takes from the first one on, at most, and which promise broke; None when none did."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_tree(folder)
        subprocess.run(["git", "apply", "--unsafe-paths", "--directory", str(folder), str(patch)], cwd="/", check=True)
        known = known_life(patch)
        for first, count in [*([(known, 1)] if known is not None and known < lives else []), (0, lives)]:
            command = [sys.executable, "-m", "tests.simulation", "--side", side, "--first", str(first)]
            done = subprocess.run(
                [*command, "--lives", str(count), "--until-broken", "--json"],
                cwd=folder, stdout=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            result = json.loads(done.stdout.splitlines()[-1])
            if result["broken"]:
                return first + result["lives"], next(iter(result["broken"]))
    return None, ""


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.sensitivity", description=__doc__)
    parser.add_argument("--side", choices=sides(), required=True)
    parser.add_argument("--lives", type=int, default=20_000)
    parser.add_argument("names", nargs="*", help="patches whose names contain one of these; all, unless given")
    options = parser.parse_args(arguments)
    chosen = [
        patch
        for patch in patches(options.side)
        if not options.names or any(name in patch.name for name in options.names)
    ]
    found = 0
    for patch in chosen:
        began = time.monotonic()
        lives, promise = find(options.side, patch, options.lives)
        found += lives is not None
        result = f"{lives:>6} lives  {promise}" if lives is not None else f"not found in {options.lives} lives"
        print(f"{patch.stem:<44} {result}  ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{options.side}: {found} of {len(chosen)} found")
    return int(found < GOAL * len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
