"""Ownership labels of a slice: written at creation, checked before use or deletion. Pure.

    tpu-launch=1              created by this program
    tpu-launch-owner          the user who created it
    tpu-launch-account        hash of the user's Google account; absent where gcloud's settings name none
    tpu-launch-run            the prefix of its runs' ids
    tpu-launch-expires        Unix seconds after which `gc` removes it

Without these labels nothing is used or deleted, unless the command says `--any-owner`.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.config import Config
from launcher.gcloud.errors import Conflict
from launcher.owner import Owner

LABEL = "tpu-launch"
OWNER, ACCOUNT, RUN, EXPIRES = (f"{LABEL}-{name}" for name in ("owner", "account", "run", "expires"))


class NotOurs(Conflict):
    """Raised when a slice or a queued resource has our name but not our labels."""


def make_labels(config: Config, owner: Owner, now: float) -> dict[str, str]:
    """Returns the labels of a slice created at `now` (Unix seconds); an expiry only with slice.expires_hours."""
    labels = {LABEL: "1", OWNER: owner.user, RUN: config.run_name}
    if owner.account:
        labels[ACCOUNT] = owner.account
    if config.slice.expires_hours is not None:
        labels[EXPIRES] = str(round(now + config.slice.expires_hours * 3600))
    return labels


def why_not_ours(labels: Mapping[str, str], owner: Owner) -> str:
    """Returns why the labels do not prove that `owner` created the slice; "" when they do."""
    if labels.get(LABEL) != "1":
        return f"tpu-launch did not create it (it has no label {LABEL}=1)"
    made_by, account = labels.get(OWNER) or "an unknown user", labels.get(ACCOUNT, "")
    if made_by != owner.user:
        return f"{made_by} created it, and you are {owner.user} (label {OWNER})"
    if account and account != owner.account:
        return f"it was created with another Google account than the one that gcloud uses here (label {ACCOUNT})"
    return ""


def require_ours(config: Config, labels: Mapping[str, str], owner: Owner) -> None:
    """Raises NotOurs unless the labels prove that `owner` created the slice, or --any-owner is set."""
    if config.any_owner:
        return
    if reason := why_not_ours(labels, owner):
        raise NotOurs(
            f"slice {config.slice.name} in {config.zone} is not yours: {reason}\n"
            "  choose another slice.name; to use or delete it nevertheless, add --any-owner to `up` or `down`"
        )
