"""The gcloud commands of a slice: its node, its queued resource ("request"), its hosts. Pure.

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

METADATA_DELIMITER = "::::"  # between values of gcloud's --metadata; does not occur in the script


def tpus_command(project: str, zone: str, *words: str, track: Sequence[str] = ()) -> list[str]:
    """Returns `gcloud [TRACK] compute tpus WORDS` for a project's zone, with --quiet: it asks the user nothing."""
    return ["gcloud", *track, "compute", "tpus", *words, f"--project={project}", f"--zone={zone}", "--quiet"]


def node_command(config: Config, verb: str, *flags: str) -> list[str]:
    """Returns the gcloud command for a verb, such as "describe", on the slice's node, of the candidate last seen (else
    of the first one). gcloud's create, delete and start return when the operation has ended."""
    placed = slice_hints.in_current_place(config)
    # Only the alpha track has --tunnel-through-iap (SDK 528).
    track = ["alpha"] if verb == "ssh" and config.slice.iap else []
    return [*tpus_command(config.project, placed.zone, "tpu-vm", verb, placed.node, track=track), *flags]


def create_command(config: Config, labels: dict[str, str]) -> list[str]:
    """Returns the command that creates the node of a placed configuration (`Config.placed`), with `labels` and
    slice.labels, which win. It waits for the operation."""
    return node_command(config, "create", f"--version={config.runtime_version}", *_node_flags(config, labels))


def _node_flags(config: Config, labels: dict[str, str]) -> list[str]:
    """Returns the flags, but that of the runtime version, that describe a node, for its creation and for a queued
    resource, with `labels` and slice.labels, which win. Always includes the type: gcloud's default is a v2-8."""
    wanted = config.slice
    flags = [f"--accelerator-type={wanted.accelerator_type}"]
    flags += [f"--{wanted.capacity}"] if wanted.capacity in ("spot", "reserved") else []
    flags += [f"--network={wanted.network}"] if wanted.network else []
    flags += [f"--subnetwork={wanted.subnetwork}"] if wanted.subnetwork else []
    flags += ["--internal-ips"] if wanted.internal_ips else []
    flags += [f"--service-account={wanted.service_account}"] if wanted.service_account else []
    flags.append("--scopes=https://www.googleapis.com/auth/cloud-platform")
    if script := idle_shutdown_script(config):
        flags.append(f"--metadata=^{METADATA_DELIMITER}^startup-script={script}")
    both = {**labels, **wanted.labels}
    return [*flags, "--labels=" + ",".join(f"{key}={value}" for key, value in sorted(both.items()))]


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


def request_command(config: Config, verb: str, *flags: str) -> list[str]:
    """Returns the gcloud command for a verb on the slice's queued resource, of the candidate last seen: alpha's for a
    create whose capacity only alpha has, and GA's for others, as alpha's --spot contradicts itself (SDK 528)."""
    placed = slice_hints.in_current_place(config)
    track = ["alpha"] if verb == "create" and _alpha_flags(placed) else []
    # --zone always: without it `create --reserved` asks for a reservation in "locations/None" (SDK 528).
    return [*tpus_command(config.project, placed.zone, "queued-resources", verb, placed.node, track=track), *flags]


def create_request_command(config: Config, labels: dict[str, str], seconds: float) -> list[str]:
    """Returns the command that makes the queued resource of a placed configuration, valid for `seconds`, with labels
    as `create_command`. It does not wait for the slice."""
    flags = [
        f"--node-id={config.node}",
        f"--runtime-version={config.runtime_version}",
        f"--valid-until-duration={round(seconds)}s",
    ]
    return request_command(config, "create", *flags, *_alpha_flags(config), *_node_flags(config, labels))


def delete_request_command(config: Config) -> list[str]:
    """Returns the command that deletes the request of the candidate last seen and, by --force, its node."""
    return request_command(config, "delete", "--force")


def _alpha_flags(config: Config) -> list[str]:
    """Returns the flags of kinds of capacity that only the alpha track has (SDK 528); [] for others."""
    wanted = config.slice
    if wanted.capacity == "flex-start":
        assert wanted.max_run_hours is not None
        return ["--provisioning-model=flex-start", f"--max-run-duration={round(wanted.max_run_hours * 3600)}s"]
    if wanted.capacity == "calendar":
        return ["--provisioning-model=reservation-bound", f"--reservation={wanted.reservation}"]
    if wanted.capacity == "reserved" and wanted.reservation is not None:
        return [f"--reservation={wanted.reservation}"]
    return []


def ssh_command(config: Config, script: str, *, worker: str = "all", dry_run: bool = False) -> list[str]:
    """Returns the command that runs a POSIX shell script on all hosts or one (`worker`: "all", or its index); with
    `dry_run`, it only prints the ssh command lines. gcloud adds no host prefix: scripts print their own."""
    assert worker == "all" or worker.isdigit(), "a subset of workers loses exit codes"
    command = shell_command(config, worker)
    if dry_run:
        command.append("--dry-run")
    elif worker == "all":
        command.append(_QUICK_KEY_EXCHANGE)
    return [*command, f"--command={script}"]


def shell_command(config: Config, worker: int | str, flags: Sequence[str] = ()) -> list[str]:
    """Returns the command that opens an ssh session on a host (or "all"). `flags`: ssh's own, as for a tunnel."""
    network_path = ["--internal-ip"] if config.slice.internal_ips else []
    if config.slice.iap:
        network_path = ["--tunnel-through-iap"]
    ssh_flags = (*_SSH_FLAGS, *(f"--ssh-flag={flag}" for flag in flags))
    return node_command(config, "ssh", f"--worker={worker}", *ssh_flags, *network_path)


def offers_command(config: Config, kind: str) -> list[str]:
    """Returns the command that prints the names, one a line, of what the zone of the candidate last seen (else of the
    first one) offers: "accelerator-types" or TPU VMs' runtime "versions". It fails if project, API or permissions are
    wrong."""
    zone = slice_hints.current(config).zone
    return [*tpus_command(config.project, zone, "tpu-vm", kind, "list"), "--format=value(name.basename())"]
