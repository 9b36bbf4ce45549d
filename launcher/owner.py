"""The user and the Google account of a workstation, for the labels of the slices that it creates.

Labels hold only a hash of the account, because all members of a project can see them.
"""

import getpass
import hashlib
import os
import re
from dataclasses import dataclass

from launcher import shell
from launcher.errors import LaunchError

_HASH_DIGITS = 12
_SECONDS = 30.0
_COMMAND = ["gcloud", "config", "get", "account", "--quiet"]


@dataclass(frozen=True)
class Owner:
    """A user with an account. Both values are valid in a label."""

    user: str
    """The name of the user on this machine."""

    account: str = ""
    """The first digits of the SHA-256 of the account's e-mail address; empty if gcloud has none."""


NOBODY = Owner("nobody")


def this_owner() -> Owner:
    """Returns this process's user name, as a valid label, with the hash of the account that gcloud uses: of its
    settings, or the service account of a VM; "" without an account or gcloud. Takes about half a second."""
    account = os.environ.get("CLOUDSDK_CORE_ACCOUNT", "")
    if not account:
        try:
            answer = shell.run(_COMMAND, timeout=_SECONDS)
            account = answer.stdout.strip() if answer.ok else ""
        except LaunchError:  # gcloud is missing or does not answer: the next command with it says so
            account = ""
    return Owner(re.sub(r"[^a-z0-9_-]", "-", getpass.getuser().lower())[:63], hash_account(account))


def hash_account(email: str) -> str:
    """Returns the first digits of the SHA-256 of an e-mail address in lower case, for a label; "" for no address."""
    return hashlib.sha256(email.strip().lower().encode()).hexdigest()[:_HASH_DIGITS] if email else ""
