"""Whose a slice is: the labels that a creation gives it, and whether they prove that it is ours. Pure.

Nothing is used or deleted whose labels do not prove it, unless the command says `--any-owner`. Labels:

    tpu-launch=1              made by this program
    tpu-launch-owner          the user who made it; slices of early versions have none, and count as everybody's
    tpu-launch-account        hash of the user's Google account; absent where gcloud's settings name none
    tpu-launch-run            the prefix of its runs' ids
    tpu-launch-expires        Unix seconds after which `gc` removes it
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.config import Config
from launcher.gcloud.errors import Conflict
from launcher.owner import Owner

LABEL = "tpu-launch"
OWNER, ACCOUNT, RUN, EXPIRES = (f"{LABEL}-{name}" for name in ("owner", "account", "run", "expires"))


class NotOurs(Conflict):
    """A slice, or a request for one, has our name, and is not provably ours."""


def make_labels(config: Config, owner: Owner, now: float) -> dict[str, str]:
    """The labels of a slice that is created at `now` (Unix seconds)."""
    labels = {LABEL: "1", OWNER: owner.user, RUN: config.run_name}
    if owner.account:
        labels[ACCOUNT] = owner.account
    if config.slice.expires_hours is not None:
        labels[EXPIRES] = str(round(now + config.slice.expires_hours * 3600))
    return labels


def why_not_ours(labels: Mapping[str, str], owner: Owner) -> str:
    """Why the labels do not prove that `owner` made it; empty when they do."""
    if labels.get(LABEL) != "1":
        return f"tpu-launch did not make it (it has no label {LABEL}=1)"
    made_by, account = labels.get(OWNER, ""), labels.get(ACCOUNT, "")
    if made_by and made_by != owner.user:
        return f"{made_by} made it, and you are {owner.user} (label {OWNER})"
    if account and account != owner.account:
        return f"another Google account made it than the one that gcloud uses here (label {ACCOUNT})"
    return ""


def require_ours(config: Config, labels: Mapping[str, str], owner: Owner) -> None:
    """Raises NotOurs for labels that do not prove it, unless the command may use the slice of any owner."""
    if config.any_owner:
        return
    if reason := why_not_ours(labels, owner):
        raise NotOurs(
            f"there is a slice {config.slice.name} in {config.zone} that is not yours: {reason}\n"
            "  choose another slice.name; or, if it is meant nevertheless, add --any-owner to `up` or `down`"
        )
