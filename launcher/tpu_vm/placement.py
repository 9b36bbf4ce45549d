"""What this machine knows of a slice that Google may not show: in which of several zones (`zone`, then `slice.zones`)
it is, and when it was asked for. Kept in the launcher's folder, for later commands.

`.tpu-launch/slices/<project>.<name>.json` holds {"zone": ...}, with several zones. It is a hint: `slices` looks in the
other zones when the slice is not where it was, so a file that is lost or cut short costs some calls and nothing else.
`<project>.<name>.asked` holds the Unix seconds of the last request for the slice, and `<project>.<name>.asking` is
marked (`launcher.file_lock`) while a gcloud that makes one lives: a request whose command was killed may arrive
after the next command has looked.
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
    """The configuration, for one zone only."""
    return replace(config, zone=zone, slice=config.slice.model_copy(update={"zones": []}))


def current_zone(config: Config) -> str:
    """The zone of the slice, as far as is known; else the first zone."""
    if len(config.zones) > 1:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(_file(config).read_text())["zone"]
            if known in config.zones:
                return str(known)
    return config.zone


def in_current_zone(config: Config) -> Config:
    """The configuration, for the zone of the slice only."""
    return in_zone(config, current_zone(config)) if len(config.zones) > 1 else config


def in_every_zone(config: Config) -> list[Config]:
    """The configuration for each of the zones, in the order of the file."""
    return [in_zone(config, zone) for zone in config.zones]


def save_zone(config: Config, zone: str) -> None:
    """Keeps the zone of the slice for later commands. A full disk must not end a creation for a hint."""
    if len(config.zones) < 2:
        return
    with contextlib.suppress(OSError):
        home.write_private(_file(config), json.dumps({"zone": zone}) + "\n")


def save_request(config: Config, now: float) -> None:
    """Keeps when the slice was asked for (Unix seconds)."""
    with contextlib.suppress(OSError):
        home.write_private(_file(config, "asked"), f"{now}\n")


def seconds_since_request(config: Config, now: float) -> float:
    """Since the slice was last asked for; infinite when that is not known."""
    with contextlib.suppress(OSError, ValueError):
        return max(0.0, now - float(_file(config, "asked").read_text()))
    return math.inf


@contextlib.contextmanager
def asking(config: Config) -> Iterator[tuple[int, ...]]:
    """Marks that the slice is being asked for. A gcloud that inherits these file descriptors keeps the mark while it
    lives, also without this process."""
    with hold_shared(_file(config, "asking")) as descriptor:
        yield () if descriptor is None else (descriptor,)


def is_asked_for(config: Config) -> bool:
    """Whether a gcloud of this machine asks for the slice now."""
    return is_held(_file(config, "asking"))


def forget(config: Config) -> None:
    """Removes what is kept."""
    for ending in ("json", "asked"):
        with contextlib.suppress(OSError):
            _file(config, ending).unlink(missing_ok=True)


def _file(config: Config, ending: str = "json") -> Path:
    return home.of_slice(config.project, config.slice.name, ending)
