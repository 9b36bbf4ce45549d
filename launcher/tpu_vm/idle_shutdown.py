"""The dead-man timer: host 0 deletes its own slice when no run has been on it for `slice.abandoned_hours`. The last
guard against a forgotten slice.

It is the slice's startup script, which Google's guest agent runs at every boot: a loop in the background that looks for
running containers of ours. With the token of the host's service account (metadata server) it asks the Cloud TPU API to
delete the queued resource that the node came from, if any, and the node. The account needs the permission to delete
TPUs (roles/tpu.admin); without it the attempts are in /var/log/tpu-launch-abandoned.log, and nothing else happens.
Nothing to clean up: the timer goes with the slice.
"""

from __future__ import annotations

from launcher.config import Config
from launcher.tpu_vm.host_scripts import LABEL_RUN

DELIMITER = "::::"  # between values of gcloud's --metadata; not in the script


def startup_script(config: Config) -> str:
    """The script; empty when the file sets no timer."""
    hours = config.slice.abandoned_hours
    if hours is None:
        return ""
    seconds = max(1, round(hours * 3600))
    parent = f"projects/{config.project}/locations/{config.zone}"
    lines = [
        "#!/bin/bash",
        "metadata() { curl -sf --max-time 10 -H 'Metadata-Flavor: Google' \"http://metadata.google.internal/computeMetadata/v1/instance/$1\"; }",
        '[ "$(metadata attributes/agent-worker-number)" = 0 ] || exit 0',
        "ask() {",
        '  token=$(metadata service-accounts/default/token | sed -n \'s/.*"access_token" *: *"\\([^"]*\\)".*/\\1/p\')',
        '  printf \'header = "Authorization: Bearer %s"\\n\' "$token" | curl -s --max-time 60 --config - -X DELETE '
        '"${CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU:-https://tpu.googleapis.com/}v2/$1"',
        "}",
        "watch() {",
        "  last=$(date +%s)",
        f"  while sleep {max(1, min(60, seconds // 10))}; do",
        f'    if [ -n "$(docker ps --quiet --filter label={LABEL_RUN})" ] || ! docker version >/dev/null 2>&1; then last=$(date +%s); fi',
        f"    if [ $(($(date +%s) - last)) -ge {seconds} ]; then",
        '      echo "$(date -u) no run for so long: deleting this slice"',
        f"      ask '{parent}/queuedResources/{config.slice.name}?force=true'",
        f"      ask '{parent}/nodes/{config.slice.name}'",
        "      sleep 60",
        "    fi",
        "  done",
        "}",
        "watch >> /var/log/tpu-launch-abandoned.log 2>&1 < /dev/null &",
        "disown",
        "exit 0",
    ]
    return "\n".join(lines) + "\n"


def metadata_flags(config: Config) -> list[str]:
    """What a creation is given; none without a timer."""
    script = startup_script(config)
    return [f"--metadata=^{DELIMITER}^startup-script={script}"] if script else []
