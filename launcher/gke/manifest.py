"""Fills jobset.yaml, the Kubernetes objects of a run in the order in which they must be created: the ConfigMap with its
configuration, the Secret that its hosts share, and the JobSet that runs its pods. Pure, but for `render`, which may
look up the image.

`render` makes the manifest for users who use kubectl alone: the cluster restarts its run, by rules that rest on the
trainer's exit codes (training.errors), all hosts of a slice together.
"""

import base64
import re
from importlib import resources
from typing import Any

from launcher.config import CONFIG_FILE, IMAGE_BY_DIGEST, Config
from launcher.errors import BadInput
from launcher.gke import workload
from launcher.gke.templates import fill
from launcher.gke.workload import CONTAINER, REPLICATED_JOB, Workload, host_name, needs_secret
from launcher.images import local
from launcher.provider import COMPILE_CACHE_FOLDER, Attempt, compile_cache_environment
from training.accelerators import gke_nodes
from training.distributed.cluster import GLOO_PORT, RENDEZVOUS_PORT, SECRET_VARIABLE
from training.errors import Exit
from training.telemetry.progress_line import FILE, FILE_VARIABLE

CONFIG_FOLDER = "/etc/tpu-launch"
SECRET_KEY = "secret"  # in the Secret that has the workload's name
# Google: "You must raise the locked memory limit so the driver can communicate with the TPU chips over DMA", with this
# command (https://cloud.google.com/kubernetes-engine/docs/how-to/tpus). `ulimit` counts KiB: this is 64 TiB, more than
# any host has. A pod has no field for the limit, and a container's default may be 64 KiB.
LOCKED_MEMORY_KIB = 68719476736
RAISE_LOCKED_MEMORY = f"""\
ulimit -l {LOCKED_MEMORY_KIB} 2>/dev/null ||
  echo "tpu-launch: the locked-memory limit stays low, so a TPU may hang: run as root (run.user)" >&2
exec "$@"
"""


def render(config: Config, *, secret: str, name: str | None = None, image: str | None = None) -> str:
    """Returns the YAML of a run that the cluster restarts, named `name` (None: run.name), with an image
    REPOSITORY@sha256:... (None: the file's published one, for which it may ask the registry) and a secret by which its
    hosts know each other. Raises BadInput if GKE can't run it, or the image's digest is unknown; LaunchError if the
    registry fails."""
    workload.check(config)  # before the registry is asked
    work = standalone_workload(config, name or config.run_name, _resolve_image(config, image), secret)
    size, file = config.accelerator, " ".join(config.document.name.rpartition("/")[2].split())  # on one line
    heading = f"# A run on {size.hosts} host(s) of {size.name} on GKE, as `tpu-launch manifest` renders it from {file}."
    return f"{heading}\n" + "---\n".join(documents(work))


def standalone_workload(config: Config, name: str, image: str, secret: str) -> Workload:
    """Returns the workload of run `name`, which the cluster restarts; checks nothing. `secret`: shared by its hosts."""
    attempt = Attempt(
        run_id=name,
        number=0,
        image=image,
        command=config.command,
        environment=config.run.environment,
        files={CONFIG_FILE: config.document.dump().encode()},
        shm_size=config.run.shm_size,
        user=config.run.user,
        host_secret=secret,
    )
    return Workload(config, attempt, by_cluster=True)


def documents(work: Workload) -> list[str]:
    """Returns the YAML of a workload's ConfigMap, of its Secret if it needs one, and of its JobSet. Raises BadInput for
    a name that GKE can't use."""
    workload.check_name(work.name)
    template, values = (resources.files(__package__) / "jobset.yaml").read_text(encoding="utf-8"), _values(work)
    config_map, secret, jobset = (fill(document, values) for document in template.split("---\n"))
    return [config_map, *([secret] if needs_secret(work.config) else []), jobset]


def _resolve_image(config: Config, given: str | None) -> str:
    """Returns the given image, or the configuration's published one, for which it may ask the registry. Raises BadInput
    for a given image without a digest, and if none was published; LaunchError if the registry fails."""
    if given is not None and not re.match(IMAGE_BY_DIGEST, given):
        raise BadInput(f"--image {given}: give a digest, REPOSITORY@sha256:..., so that all hosts run the same image")
    reference = given or local.published(config)
    if reference is None:
        raise BadInput(
            f"{config.document.name}: the digest of its image is not known: give --image REPOSITORY@sha256:..., or "
            "image.reference, or let `tpu-launch run` build and push it (image.repository) first"
        )
    return reference


def _values(work: Workload) -> dict[str, Any]:
    """Returns the values of jobset.yaml."""
    config, attempt, slice_ = work.config, work.attempt, work.config.accelerator
    user, _, group = (attempt.user or "").partition(":")
    return {
        "work": work,
        "attempt": attempt,
        "gke": config.gke,
        **{code.name: int(code) for code in Exit},
        "slice": slice_,
        "several_hosts": slice_.hosts > 1,
        "machine_type": gke_nodes(slice_).machine_type,
        "node_selector": workload.node_selector(config),
        "spot": config.slice.capacity == "spot",
        # hosts that find and trust each other
        "replicated_job": REPLICATED_JOB,
        "host_pattern": host_name(work.name, "<i>"),
        "host_glob": host_name(work.name, "*"),
        "rendezvous_port": RENDEZVOUS_PORT,
        "gloo_port": GLOO_PORT,
        "needs_secret": needs_secret(config),
        "secret_variable": SECRET_VARIABLE,
        "secret_key": SECRET_KEY,
        "secret": base64.b64encode(attempt.host_secret.encode()).decode(),
        # the container, its rights and its files
        "container": CONTAINER,
        "command": ["sh", "-c", RAISE_LOCKED_MEMORY, "sh", *map(literal, attempt.command)],
        "attempt_number": str(attempt.number),
        "environment": _environment(config, attempt),
        "progress_variable": FILE_VARIABLE,
        "progress_file": FILE,
        "grace": workload.grace_seconds(config),
        "user": int(user or 0),
        "has_group": bool(group),
        "group": int(group or 0),
        "needs_token": config.gke.service_account or config.gke.gcsfuse,
        "config_folder": CONFIG_FOLDER,
        "files": {name: content.decode() for name, content in attempt.files.items()},
        "shm_size": attempt.shm_size[:-1] + {"k": "Ki", "m": "Mi", "g": "Gi"}[attempt.shm_size[-1]],  # Docker's "16g"
        "compile_cache": COMPILE_CACHE_FOLDER,
    }


def _environment(config: Config, attempt: Attempt) -> list[dict[str, Any]]:
    """Returns the container's variables that the user gives, secrets by reference, after those of the node's cache."""
    cache = compile_cache_environment(config.run.compile_cache_gb) if config.gke.node_cache else {}
    given = [*cache.items(), *sorted(attempt.environment.items())]
    entries: list[dict[str, Any]] = [{"name": key, "value": literal(value)} for key, value in given]
    for name, source in sorted(config.gke.secrets.items()):
        secret, _, key = source.partition("/")
        entries.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return entries


def literal(text: str) -> str:
    """Escapes an argument or the value of a variable so that a pod gets it unchanged: the kubelet expands `$(NAME)` and
    `$$` (https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables)."""
    return re.sub(r"\$(?=[$(])", "$$", text)
