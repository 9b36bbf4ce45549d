"""Who works at a machine: the name and the Google account that go into the labels of what is created from it.

The account is read from gcloud's own settings, because asking gcloud for it takes half a second. Only a hash of it is
kept: labels are visible to everybody in a project.
"""

from __future__ import annotations

import configparser
import getpass
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HASH_DIGITS = 12


@dataclass(frozen=True)
class Owner:
    """A person, or an account that works for somebody. Both values are fit for a label."""

    user: str
    """Name of the user of this machine."""

    account: str = ""
    """Begin of the SHA-256 of the account's e-mail address; empty when gcloud's settings name none."""


NOBODY = Owner("nobody")


def this_owner(environment: Mapping[str, str]) -> Owner:
    """The user of this process, and the account that gcloud would use."""
    return Owner(re.sub(r"[^a-z0-9_-]", "-", getpass.getuser().lower())[:63], hash_account(_account(environment)))


def hash_account(email: str) -> str:
    """An account's e-mail address as a label's value; empty for none."""
    return hashlib.sha256(email.strip().lower().encode()).hexdigest()[:_HASH_DIGITS] if email else ""


def _account(environment: Mapping[str, str]) -> str:
    """`core/account`, as gcloud finds it: from the environment, else from its active configuration."""
    if account := environment.get("CLOUDSDK_CORE_ACCOUNT"):
        return account
    home = environment.get("CLOUDSDK_CONFIG")
    folder = Path(home) if home else Path(environment.get("HOME", "~")).expanduser() / ".config" / "gcloud"
    settings = configparser.ConfigParser(interpolation=None)
    try:
        name = environment.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or _read(folder / "active_config") or "default"
        settings.read_string(_read(folder / "configurations" / f"config_{name}"))
    except (configparser.Error, OSError, ValueError):  # gcloud itself will complain
        return ""
    return settings.get("core", "account", fallback="")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
