"""`profile --open`: copies the profiles that the hosts of a live run have taken to this machine, for TensorBoard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import BadInput, LaunchError
from training import storage

# What `tpu-train profile` prints: TensorBoard's log folder, and in it the plugin's file of a host.
_PRINTED = re.compile(r"steps \d+ to \d+: (\S+/profiles/[^/\s]+)/(plugins/profile/[^/\s]+/[^/\s]+\.xplane\.pb)")


def find_tensorboard() -> str:
    """The path of a TensorBoard that has the profile plugin. Raises BadInput where there is none."""
    path = shutil.which("tensorboard")
    if path is None:
        problem = "tensorboard is not on this machine's PATH"
    elif not Path(path).resolve().with_name("xprof").exists():  # the plugin's package installs this program beside it
        problem = f"{path} has no profile plugin"
    else:
        return path
    raise BadInput(f"--open: {problem}: `pip install tensorboard xprof`, or leave --open out")


def fetch(lines: Sequence[str], folder: Path) -> int:
    """Copies the profiles that these lines of hosts name into `folder`, a log folder for TensorBoard.

    Returns:
        How many there were.

    Raises:
        LaunchError: One is not in Cloud Storage, or can't be read.
    """
    found = [match for line in lines if (match := _PRINTED.fullmatch(line))]
    for match in found:
        url = f"{match[1]}/{match[2]}"
        if not storage.is_remote(url):
            raise LaunchError(f"--open: {url} is on the host; profiles are copied from Cloud Storage alone")
        try:
            storage.download(url, folder / match[2])
        except storage.StorageError as error:
            raise LaunchError(f"--open: the profile can't be copied here: {error}") from None
    return len(found)
