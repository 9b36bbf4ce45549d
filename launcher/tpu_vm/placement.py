"""In which of several zones (`zone`, then `slice.zones`) a slice is: kept in the launcher's folder, so that every
command goes there.

`.tpu-launch/slices/<project>.<name>.json` holds {"zone": ...}. It is a hint: `slices` looks in the other zones when the
slice is not where it was, so a file that is lost or cut short costs some calls and nothing else. With one zone there is
nothing to keep.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

from launcher import home
from launcher.config import Config


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


def forget_zone(config: Config) -> None:
    """Removes what is kept."""
    with contextlib.suppress(OSError):
        _file(config).unlink(missing_ok=True)


def _file(config: Config) -> Path:
    return home.where() / "slices" / f"{config.project.replace('/', '_')}.{config.slice.name}.json"
