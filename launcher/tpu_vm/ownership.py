"""Ownership labels of a slice: written at creation, checked before use or deletion. Pure.

    tpu-launch=1              created by this program
    tpu-launch-owner          the user who created it
    tpu-launch-account        hash of the user's Google account; absent where gcloud has none
    tpu-launch-run            the prefix of its runs' ids
    tpu-launch-expires        Unix seconds after which `gc` removes it

Without these labels nothing is used or deleted, unless the command says `--any-owner`.
"""

from collections.abc import Mapping

from launcher.config import Config
from launcher.gcloud.errors import Conflict
from launcher.workstation import Owner

LABEL = "tpu-launch"
OWNER, ACCOUNT, RUN, EXPIRES = (f"{LABEL}-{name}" for name in ("owner", "account", "run", "expires"))


class NotOurs(Conflict):
    """Raised when a slice or a queued resource has our name but not our labels."""


def make_labels(config: Config, owner: Owner, now: float) -> dict[str, str]:
    """Returns the labels of a slice created at `now` (Unix seconds): tpu-launch's own, user, run, a hash of the Google
    account if it is known, and with slice.expires_hours the time at which the slice expires."""
    labels = {LABEL: "1", OWNER: owner.user, RUN: config.run_name}
    if owner.account:
        labels[ACCOUNT] = owner.account
    if config.slice.expires_hours is not None:
        labels[EXPIRES] = str(round(now + config.slice.expires_hours * 3600))
    return labels


def why_not_ours(labels: Mapping[str, str], owner: Owner, *, deletion: bool = False) -> str:
    """Returns why the labels do not prove that `owner` created the slice; "" when they do. For a `deletion` a user name
    is no proof without an account: everybody is root or ubuntu on some VM."""
    if labels.get(LABEL) != "1":
        return f"tpu-launch did not create it (it has no label {LABEL}=1)"
    made_by, account = labels.get(OWNER) or "an unknown user", labels.get(ACCOUNT, "")
    if made_by != owner.user:
        return f"{made_by} created it, and you are {owner.user} (label {OWNER})"
    if account != owner.account:
        return f"another Google account than the one that gcloud uses here created it, or none (label {ACCOUNT})"
    if deletion and not account:
        return f"{made_by} without a Google account created it (no label {ACCOUNT}), which may be another {made_by}"
    return ""


def require_ours(config: Config, labels: Mapping[str, str], owner: Owner, *, deletion: bool = False) -> None:
    """Raises NotOurs unless the labels prove that `owner` created the slice (`why_not_ours`), or --any-owner is set."""
    if config.any_owner:
        return
    if reason := why_not_ours(labels, owner, deletion=deletion):
        raise NotOurs(
            f"slice {config.slice.name} in {config.zone} is not yours: {reason}\n"
            "  choose another slice.name; to use or delete it nevertheless, add --any-owner to `up` or `down`"
        )
