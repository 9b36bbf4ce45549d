"""Local hints about a slice: as which of its candidates it was last seen, and the time of the last create request.
Kept in the launcher's folder for later commands.

    .tpu-launch/slices/<project>.<name>.json       accelerator_type, zone, capacity; only with several candidates
    .tpu-launch/slices/<project>.<name>.asked      Unix seconds of the last create request
    .tpu-launch/slices/<project>.<name>.asking     locked while a gcloud that creates the slice lives: the request of a
                                                   command that was killed may arrive after the next command has looked

A hint that is lost or cut short costs some calls and nothing else: `slices` looks for the other candidates as well.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from launcher import home
from launcher.config import Candidate, Config
from launcher.home import hold_shared, is_held


def in_every_place(config: Config) -> list[Config]:
    """Returns the configuration of each candidate, in the order of preference."""
    return [config.placed(candidate) for candidate in config.candidates]


def current(config: Config) -> Candidate:
    """Returns the candidate as which the slice was last seen; the first one when that is not known."""
    return last_seen(config) or config.candidates[0]


def last_seen(config: Config) -> Candidate | None:
    """Returns the candidate as which this machine last saw the slice, or the only one; None if that is not known."""
    candidates = config.candidates
    if len(candidates) == 1:
        return candidates[0]
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = Candidate(**json.loads(_file(config).read_text()))
        if known in candidates:
            return known
    return None


def in_current_place(config: Config) -> Config:
    """Returns the configuration of the candidate last seen, else of the first; `config` itself if there is one only."""
    return config.placed(current(config)) if len(config.candidates) > 1 else config


def save_place(config: Config, candidate: Candidate) -> None:
    """Writes the slice's candidate, if it has several, to its local file. Ignores a full disk: a creation goes on."""
    if len(config.candidates) < 2:
        return
    with contextlib.suppress(OSError):
        home.write_private(_file(config), json.dumps(asdict(candidate)) + "\n")


def save_create_time(config: Config, now: float) -> None:
    """Writes the time of a create request (Unix seconds) to a local file. Ignores a full disk."""
    with contextlib.suppress(OSError):
        home.write_private(_file(config, "asked"), f"{now}\n")


def seconds_since_create(config: Config, now: float) -> float:
    """Returns the seconds from this machine's last create request to `now` (Unix seconds); infinity if unknown."""
    with contextlib.suppress(OSError, ValueError):
        return max(0.0, now - float(_file(config, "asked").read_text()))
    return math.inf


@contextlib.contextmanager
def mark_create_in_flight(config: Config) -> Iterator[tuple[int, ...]]:
    """Marks that a gcloud creates the slice. Yields file descriptors, none if the mark can't be made; a gcloud that
    inherits them keeps the mark while it lives, even after this process has ended."""
    with hold_shared(_file(config, "asking")) as descriptor:
        yield () if descriptor is None else (descriptor,)


def is_create_in_flight(config: Config) -> bool:
    """Returns whether a gcloud of this machine is creating the slice now; False, with a warning, if unknown."""
    return bool(is_held(_file(config, "asking")))


def forget(config: Config) -> None:
    """Deletes the local files of candidate and last create request; keeps the lock of an in-flight create."""
    for ending in ("json", "asked"):
        with contextlib.suppress(OSError):
            _file(config, ending).unlink(missing_ok=True)


def _file(config: Config, ending: str = "json") -> Path:
    return home.of_slice(config.project, config.slice.name, ending)
