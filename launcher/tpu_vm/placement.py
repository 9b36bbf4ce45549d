"""In which of several zones a slice is (`zone`, then `slice.zones`): remembered in the launcher's folder, so that every
command goes there.

`.tpu-launch/slices/<project>.<name>.json` holds {"zone": ...}. It is a hint: `slices` looks in the other zones when the
slice is not where it was, so a file that is lost or cut short costs some questions and nothing else. With one zone
there is nothing to remember.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

from launcher import home
from launcher.config import Config


def at(config: Config, zone: str) -> Config:
    """The same, for one zone only."""
    return replace(config, zone=zone, slice=config.slice.model_copy(update={"zones": []}))


def zone(config: Config) -> str:
    """Where the slice is, as far as is known; else the first zone."""
    if len(config.zones) > 1:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(_file(config).read_text())["zone"]
            if known in config.zones:
                return str(known)
    return config.zone


def placed(config: Config) -> Config:
    return at(config, zone(config)) if len(config.zones) > 1 else config


def in_order(config: Config) -> list[Config]:
    """One zone each, in the order of the file."""
    return [at(config, each) for each in config.zones]


def remember(config: Config, where: str) -> None:
    if len(config.zones) < 2:
        return
    home.write_private(_file(config), json.dumps({"zone": where}) + "\n")


def forget(config: Config) -> None:
    _file(config).unlink(missing_ok=True)


def _file(config: Config) -> Path:
    return home.where() / "slices" / f"{config.project.replace('/', '_')}.{config.slice.name}.json"
