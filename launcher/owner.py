"""The user and the Google account of a workstation, for the labels of the slices that it creates.

The account is read from gcloud's settings, because asking gcloud for it takes half a second. Labels hold only a hash of
it, because all members of a project can see them.
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
    """A user with an account. Both values are valid in a label."""

    user: str
    """The name of the user on this machine."""

    account: str = ""
    """The first digits of the SHA-256 of the account's e-mail address; empty if gcloud's settings name none."""


NOBODY = Owner("nobody")


def this_owner(environment: Mapping[str, str]) -> Owner:
    """Returns this process's user name, as a valid label, with the hash of the account that gcloud would use."""
    return Owner(re.sub(r"[^a-z0-9_-]", "-", getpass.getuser().lower())[:63], hash_account(_account(environment)))


def hash_account(email: str) -> str:
    """Returns the first digits of the SHA-256 of an e-mail address in lower case, for a label; "" for no address."""
    return hashlib.sha256(email.strip().lower().encode()).hexdigest()[:_HASH_DIGITS] if email else ""


def _account(environment: Mapping[str, str]) -> str:
    """Returns `core/account` as gcloud finds it: in the environment, else in its active configuration; "" if not set or
    not readable."""
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
    """Returns a file's text without white space around it; "" if the file is missing."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
