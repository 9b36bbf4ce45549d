"""Whether a simulator finds the defects that are known: `python -m tests.simulation.sensitivity --side trainer
[--lives 20000] [NAME...]`.

Each file of <side>/undone/ takes one protection away (a patch that `git apply` takes). It is applied to a copy of the
tree, where lives are played until a promise breaks; those that never reach what it changes are left out. Printed is a
table; the exit code is 1 when fewer than 90 % are found.

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

from tests.simulation import reached
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


def undo(patch: Path, folder: Path) -> None:
    """Applies a patch to a copy of the tree."""
    subprocess.run(["git", "apply", "--unsafe-paths", "--directory", str(folder), str(patch)], cwd="/", check=True)


def changes(patch: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The files that a patch changes, before and after it."""
    names = sorted(set(re.findall(r"^--- \w+/(\S+)", patch.read_text(), re.MULTILINE)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
        before = {name: (folder / name).read_text() for name in names}
        undo(patch, folder)
        return before, {name: (folder / name).read_text() for name in names}


def lives_that_matter(side: str, chosen: list[Path], lives: int) -> list[list[int]]:
    """For each patch the lives that reach what it changes: the others are the same with it and without it."""
    marks: dict[str, list[tuple[int, int]]] = {}
    anywhere = set()
    for number, patch in enumerate(chosen):
        places = reached.places_of(*changes(patch))
        if places is None:
            anywhere.add(number)
        for name, lines in (places or {}).items():
            marks.setdefault(name, []).extend((line, number) for line in lines)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_tree(folder)
        for name, places_in_file in marks.items():
            (folder / name).write_text(reached.mark((folder / name).read_text(), places_in_file))
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulation.reached", side, "0", str(lives)],
            cwd=folder, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    seen = {int(number): found for number, found in json.loads(done.stdout.splitlines()[-1]).items()}
    return [list(range(lives)) if number in anywhere else seen.get(number, []) for number in range(len(chosen))]


def find(side: str, patch: Path, seeds: list[int]) -> tuple[int | None, str]:
    """The first of these lives in which a promise breaks without the protection, and which promise; None when none
    does."""
    known = known_life(patch)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_tree(folder)
        undo(patch, folder)
        for some in ([known] if known is not None else [], seeds):
            if not some:
                continue
            (folder / "seeds.json").write_text(json.dumps(some))
            command = [sys.executable, "-m", "tests.simulation", "--side", side, "--seeds", "seeds.json"]
            done = subprocess.run(
                [*command, "--until-broken", "--json"], cwd=folder, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, check=False,
            )  # fmt: skip
            if broken := json.loads(done.stdout.splitlines()[-1])["broken"]:
                promise, lives = next(iter(broken.items()))
                return lives[0][0], promise
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
    began = time.monotonic()
    for patch, seeds in zip(chosen, lives_that_matter(options.side, chosen, options.lives), strict=True):
        life, promise = find(options.side, patch, seeds)
        found += life is not None
        result = f"{life + 1:>6} lives  {promise}" if life is not None else f"not found in {options.lives} lives"
        print(f"{patch.stem:<44} {result}  ({len(seeds)} reach it; {time.monotonic() - began:.0f} s)", flush=True)
        began = time.monotonic()
    print(f"{options.side}: {found} of {len(chosen)} found")
    return int(found < GOAL * len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
