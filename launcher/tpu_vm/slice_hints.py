"""Local hints about a slice: the zone it is in, of several (`zone`, then `slice.zones`), and the time of the last
create request. Kept in the launcher's folder for later commands.

    .tpu-launch/slices/<project>.<name>.json       {"zone": ...}, only with several zones
    .tpu-launch/slices/<project>.<name>.asked      Unix seconds of the last create request
    .tpu-launch/slices/<project>.<name>.asking     locked while a gcloud that creates the slice lives: the request of a
                                                   command that was killed may arrive after the next command has looked

A hint that is lost or cut short costs some calls and nothing else: `slices` looks in the other zones as well.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from launcher import home
from launcher.config import Config
from launcher.file_lock import hold_shared, is_held


def in_zone(config: Config, zone: str) -> Config:
    """Returns the configuration for one zone only."""
    return replace(config, zone=zone, slice=config.slice.model_copy(update={"zones": []}))


def in_every_zone(config: Config) -> list[Config]:
    """Returns the configuration for each of its zones, in the order of the file."""
    return [in_zone(config, zone) for zone in config.zones]


def current_zone(config: Config) -> str:
    """Returns the zone in which the slice was last seen; the first zone when that is not known."""
    if len(config.zones) > 1:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(_file(config).read_text())["zone"]
            if known in config.zones:
                return str(known)
    return config.zone


def in_current_zone(config: Config) -> Config:
    return in_zone(config, current_zone(config)) if len(config.zones) > 1 else config


def save_zone(config: Config, zone: str) -> None:
    """Keeps the zone of the slice for later commands. Ignores a full disk, which must not end a creation."""
    if len(config.zones) < 2:
        return
    with contextlib.suppress(OSError):
        home.write_private(_file(config), json.dumps({"zone": zone}) + "\n")


def save_create_time(config: Config, now: float) -> None:
    """Keeps the time of a create request (Unix seconds). Ignores a full disk."""
    with contextlib.suppress(OSError):
        home.write_private(_file(config, "asked"), f"{now}\n")


def seconds_since_create(config: Config, now: float) -> float:
    """Returns the seconds since the last create request; infinity when none is known."""
    with contextlib.suppress(OSError, ValueError):
        return max(0.0, now - float(_file(config, "asked").read_text()))
    return math.inf


@contextlib.contextmanager
def mark_create_in_flight(config: Config) -> Iterator[tuple[int, ...]]:
    """Marks that a gcloud creates the slice. Yields file descriptors; a gcloud that inherits them keeps the mark while
    it lives, even after this process has ended."""
    with hold_shared(_file(config, "asking")) as descriptor:
        yield () if descriptor is None else (descriptor,)


def is_create_in_flight(config: Config) -> bool:
    """Returns whether a gcloud of this machine is creating the slice now; False, with a warning, if that can't be
    told."""
    return bool(is_held(_file(config, "asking")))


def forget(config: Config) -> None:
    """Removes the zone and the time of the last create request; keeps the lock of an in-flight create."""
    for ending in ("json", "asked"):
        with contextlib.suppress(OSError):
            _file(config, ending).unlink(missing_ok=True)


def _file(config: Config, ending: str = "json") -> Path:
    return home.of_slice(config.project, config.slice.name, ending)
