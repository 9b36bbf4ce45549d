"""Idle shutdown: host 0 deletes its own slice when no run has been on it for `slice.abandoned_hours`. The last guard
against a forgotten slice.

It is the slice's startup script (`scripts/idle_shutdown.sh`), which Google's guest agent runs at every boot: a loop in
the background that looks for running containers of tpu-launch. With the token of the host's service account (metadata
server) it asks the Cloud TPU API to delete the queued resource that the node came from, if any, and the node. The
account needs the permission to delete TPUs (roles/tpu.admin); without it the attempts are in
/var/log/tpu-launch-abandoned.log, and nothing else happens. There is nothing to clean up: the script goes with the
slice.
"""

from __future__ import annotations

from launcher.config import Config
from launcher.tpu_vm.host_scripts import LABEL_RUN
from launcher.tpu_vm.scripts import render

DELIMITER = "::::"  # between values of gcloud's --metadata; not in the script


def startup_script(config: Config) -> str:
    """The script; empty when slice.abandoned_hours is not set."""
    hours = config.slice.abandoned_hours
    if hours is None:
        return ""
    seconds = max(1, round(hours * 3600))
    return "#!/bin/bash\n" + render(
        "idle_shutdown",
        parent=f"projects/{config.project}/locations/{config.zone}",
        slice=config.slice.name,
        label_run=LABEL_RUN,
        idle_seconds=seconds,
        interval=max(1, min(60, seconds // 10)),
    )


def metadata_flags(config: Config) -> list[str]:
    """The flags of gcloud that give a new node its startup script; none without idle shutdown."""
    script = startup_script(config)
    return [f"--metadata=^{DELIMITER}^startup-script={script}"] if script else []
