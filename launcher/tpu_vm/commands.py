"""The gcloud commands of a slice. Pure.

Known defects of the SDK (528.0.0) shape every command: `--output-directory` is broken, subsets of workers lose exit
codes, and ssh's 255 makes gcloud run the whole command again. So commands address `all` or one worker, and no remote
command returns 255.
"""

from collections.abc import Sequence

from launcher.config import Config
from launcher.tpu_vm import slice_hints
from launcher.tpu_vm.host_scripts import LABEL_RUN, render

# gcloud sets no time-outs for ssh: a dead host would hang each call for minutes.
_SSH_FLAGS = (
    "--ssh-flag=-oConnectTimeout=10",
    "--ssh-flag=-oServerAliveInterval=15",
    "--ssh-flag=-oServerAliveCountMax=3",
)
# OpenSSH 9.0 to 9.8 prefer the key exchange sntrup761, which takes 60 ms of the workstation's processor a host (Debian
# 12: 75 ms a connection, 12 ms without). Without it they take X25519, as our own connections do; newer clients take
# ML-KEM. A script for all hosts holds nothing that must stay confidential for decades. What may (secrets, overlays,
# the user's commands) goes to one host a call, with the client's own choice.
_QUICK_KEY_EXCHANGE = "--ssh-flag=-oKexAlgorithms=-sntrup761*"


def _base(config: Config, *words: str) -> list[str]:
    """Returns the gcloud command for `words` (verb, slice) in the slice's current zone; ssh through IAP uses alpha."""
    # Only the alpha track has --tunnel-through-iap (SDK 528).
    track = ["alpha"] if words[0] == "ssh" and config.slice.iap else []
    place = [f"--project={config.project}", f"--zone={slice_hints.current(config).zone}"]
    return ["gcloud", *track, "compute", "tpus", "tpu-vm", *words, *place, "--quiet"]


def _node(config: Config) -> str:
    """Returns the name of the slice's current node."""
    return slice_hints.in_current_place(config).node


def create_command(config: Config, labels: dict[str, str]) -> list[str]:
    """Returns the command that creates the node and waits for the operation."""
    return [*_base(config, "create", _node(config)), f"--version={config.runtime_version}", *node_flags(config, labels)]


def node_flags(config: Config, labels: dict[str, str]) -> list[str]:
    """Returns the flags that describe a node, for its creation and for a queued resource, with `labels` and
    slice.labels. Always includes the type: gcloud's default is a v2-8."""
    wanted = config.slice
    command = [f"--accelerator-type={wanted.accelerator_type}"]
    if wanted.capacity in ("spot", "reserved"):
        command.append(f"--{wanted.capacity}")
    if wanted.network:
        command.append(f"--network={wanted.network}")
    if wanted.subnetwork:
        command.append(f"--subnetwork={wanted.subnetwork}")
    if wanted.internal_ips:
        command.append("--internal-ips")
    if wanted.service_account:
        command.append(f"--service-account={wanted.service_account}")
    command.append("--scopes=https://www.googleapis.com/auth/cloud-platform")
    both = {**labels, **wanted.labels}
    command += idle_shutdown_flags(config)
    command.append("--labels=" + ",".join(f"{key}={value}" for key, value in sorted(both.items())))
    return command


def describe_command(config: Config) -> list[str]:
    """Returns the command that prints the node as JSON."""
    return [*_base(config, "describe", _node(config)), "--format=json"]


def delete_command(config: Config) -> list[str]:
    """Returns the command that deletes the node and waits for the operation."""
    return _base(config, "delete", _node(config))


def start_command(config: Config) -> list[str]:
    """Returns the command that starts a stopped node and waits for the operation."""
    return _base(config, "start", _node(config))


def ssh_command(config: Config, script: str, *, worker: str = "all", dry_run: bool = False) -> list[str]:
    """Returns the command that runs a POSIX shell script on all hosts, or on one; with `dry_run`, it prints the ssh
    command lines instead. gcloud adds no host prefix: scripts print their own."""
    assert worker == "all" or worker.isdigit(), "a subset of workers loses exit codes"
    command = [*_base(config, "ssh", _node(config)), f"--worker={worker}", *_SSH_FLAGS]
    command += _network_path(config)
    if worker == "all" and not dry_run:
        command.append(_QUICK_KEY_EXCHANGE)
    if dry_run:
        command.append("--dry-run")
    return [*command, f"--command={script}"]


def shell_command(config: Config, worker: int, flags: Sequence[str] = ()) -> list[str]:
    """Returns the command that opens the user's ssh session on one host or, with flags of ssh, a tunnel to it."""
    command = [
        *_base(config, "ssh", _node(config)),
        f"--worker={worker}",
        *_SSH_FLAGS,
        *(f"--ssh-flag={flag}" for flag in flags),
    ]
    return [*command, *_network_path(config)]


def _network_path(config: Config) -> list[str]:
    """Returns the flag that reaches hosts without an external address (IAP or internal IP); [] when they have one."""
    if config.slice.iap:
        return ["--tunnel-through-iap"]
    return ["--internal-ip"] if config.slice.internal_ips else []


def accelerator_types_command(config: Config) -> list[str]:
    """Returns the command that lists the zone's accelerator types; fails if project, API or permissions are wrong."""
    return [*_base(config, "accelerator-types", "list"), "--format=value(name.basename())"]


def runtime_versions_command(config: Config) -> list[str]:
    """Returns the command that lists the zone's runtime versions for TPU VMs."""
    return [*_base(config, "versions", "list"), "--format=value(name.basename())"]


METADATA_DELIMITER = "::::"  # between values of gcloud's --metadata; does not occur in the script


def idle_shutdown_script(config: Config) -> str:
    """Returns the startup script by which host 0 deletes its own slice when no run has been on it for
    `slice.abandoned_hours`: the last guard against a forgotten slice. "" when that is not set. Google's guest agent
    runs it at every boot. It calls the Cloud TPU API with the token of the host's service account, which needs
    roles/tpu.admin; failures are logged to /var/log/tpu-launch-abandoned.log."""
    hours = config.slice.abandoned_hours
    if hours is None:
        return ""
    seconds = max(1, round(hours * 3600))
    return "#!/bin/bash\n" + render(
        "idle_shutdown",
        parent=f"projects/{config.project}/locations/{config.zone}",
        slice=config.node,
        label_run=LABEL_RUN,
        idle_seconds=seconds,
        interval=max(1, min(60, seconds // 10)),
    )


def idle_shutdown_flags(config: Config) -> list[str]:
    """Returns the gcloud flags that give a new node its startup script; [] without slice.abandoned_hours."""
    script = idle_shutdown_script(config)
    return [f"--metadata=^{METADATA_DELIMITER}^startup-script={script}"] if script else []
