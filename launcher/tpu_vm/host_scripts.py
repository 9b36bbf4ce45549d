"""The scripts of `scripts/` with their parameters: one function for each remote command. `host_output` parses output.

Pure: an attempt in, the text of a remote command out.
"""

import base64
import math
import re
import shlex
from collections.abc import Mapping, Sequence

from launcher.container_scripts import DUMP_STACKS, READ_PROGRESS
from launcher.images.distribution.reference import is_google
from launcher.log_lines import LINE_BYTES
from launcher.provider import COMPILE_CACHE_FOLDER, DELIVERY_SECONDS, Attempt, compile_cache_environment
from launcher.tpu_vm.scripts import load, render
from training.accelerators import accelerator
from training.telemetry.progress_line import FILE, FILE_VARIABLE

LABEL_RUN = "tpu-launch.run"
LABEL_ATTEMPT = "tpu-launch.attempt"
LABEL_BOOT = "tpu-launch.boot"  # the host's boot id at the container's creation; added by the host

LOG_BYTES = LINE_BYTES + 100_000  # of one observation: a page holds the longest line, and costs 60 times its size

# What a host keeps of a container's output: 4 GB, of a boot disk of 100 GB. Beyond it, the engine drops the oldest.
_KEPT_LOG = ("--log-driver", "json-file", "--log-opt", "max-size=1g", "--log-opt", "max-file=4")

HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_WITHOUT_HUGE_PAGES = ("v2", "v3", "v4")

# A volume that the host's engine creates at its first mount, and which outlives containers.
_PROGRAMS_VOLUME = "tpu-launch-compiled-programs"

EXECUTION_MARK = "tpu-launch-exec-"  # begins the marks of a user's commands; begin_once.sh names it too
_SECRETS_FOLDER = "/run/tpu-launch"  # in the container; await_secrets.sh and receive_secrets.sh name it too


def create_arguments(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> list[str]:
    """Returns the arguments of `docker create` on every host, with image and command; each host adds TPU_WORKER_ID.
    Where `attempt.waits`, the command begins only after secrets and overlay were delivered into the container."""
    arguments = ["--name", attempt.container]
    arguments += ["--label", f"{LABEL_RUN}={attempt.run_id}", "--label", f"{LABEL_ATTEMPT}={attempt.number}"]
    arguments += ["--privileged", "--network", "host", "--init", *_KEPT_LOG]
    arguments += ["--shm-size", attempt.shm_size, "--ulimit", "memlock=-1:-1"]
    if attempt.compile_cache_gb:
        arguments += ["--volume", f"{_PROGRAMS_VOLUME}:{COMPILE_CACHE_FOLDER}"]
    # For the engine's own stops: without it, a container has 10 s when its host shuts down.
    arguments += ["--stop-timeout", str(attempt.stop_seconds)]
    # Root: only root has capabilities in a privileged container, and the drivers of v2 to v4 map a chip's memory only
    # for CAP_SYS_ADMIN (kernel, drivers/staging/gasket/gasket_core.c).
    arguments += ["--user", attempt.user or "0"]
    for key, value in container_environment(attempt, hosts, accelerator_type).items():
        arguments += ["--env", f"{key}={value}"]
    if not attempt.waits(len(hosts)):
        return [*arguments, attempt.image, *attempt.command]
    tmpfs = ["--tmpfs", f"{_SECRETS_FOLDER}:mode=1777,size=1m"]
    wait = render("await_secrets", seconds=math.ceil(attempt.start_seconds) + DELIVERY_SECONDS)
    return [*arguments, *tmpfs, attempt.image, "sh", "-c", wait, "sh", *attempt.command]


def container_environment(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> dict[str, str]:
    """Returns the environment of every host's container but TPU_WORKER_ID; the attempt's variables override ours."""
    return {
        "PJRT_DEVICE": "TPU",
        "TPU_LAUNCH_RUN_ID": attempt.run_id,
        "TPU_LAUNCH_ATTEMPT": str(attempt.number),
        "TPU_ACCELERATOR_TYPE": accelerator_type,
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
        FILE_VARIABLE: FILE,
        **compile_cache_environment(attempt.compile_cache_gb),
        **attempt.environment,
    }


def huge_pages_file(accelerator_type: str) -> str:
    """Returns the path of the kernel's huge pages switch where it speeds up libtpu's start (v5e and newer); else ""."""
    return "" if accelerator(accelerator_type).generation.name in _WITHOUT_HUGE_PAGES else HUGE_PAGES


def start_script(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> str:
    """Returns the script that removes containers of older attempts, pulls the image, creates the container and starts
    it unless it ran already. It reports `started <image id> <Unix seconds> <huge pages>`, `moved` (the host has another
    address than in `hosts`), `busy <run id>` or `failed <reason>`. It pulls an image named by digest unless the host
    has it, with the token of the host's service account from Google's registries and without credentials from others.
    An image named by its id must be on the host. It switches on transparent huge pages where they help; without
    permission, it reports their setting."""
    registry = attempt.image.split("/")[0]
    return render(
        "start",
        *create_arguments(attempt, hosts, accelerator_type),
        container=attempt.container,
        image=attempt.image,
        run_id=attempt.run_id,
        attempt=attempt.number,
        label_run=LABEL_RUN,
        label_attempt=LABEL_ATTEMPT,
        label_boot=LABEL_BOOT,
        hosts=" ".join(f"{worker}={address}" for worker, address in enumerate(hosts)),
        list_holders=load("list_tpu_holders"),
        huge_pages=huge_pages_file(accelerator_type),
        pull="@" in attempt.image,
        registry=registry if is_google(registry) else "",
        files="\n".join(_file_line(name, content) for name, content in attempt.files.items()),
    )


def _file_line(name: str, content: bytes) -> str:
    """Returns the line by which start.sh gets a file: its name, and its content in base64."""
    assert re.fullmatch(r"[\w.-]+", name), name
    return f"{name} {base64.b64encode(content).decode()}"


def overlay_script(attempt: Attempt) -> str:
    """Returns the script that unpacks its input (base64) in the container; it reports `copied` or `failed <reason>`."""
    overlay = attempt.overlay
    assert overlay is not None
    return render("copy_overlay", container=attempt.container, target=overlay.target, digest=overlay.digest)


def check_engine_script() -> str:
    """Returns the script that reports `up` if the host's container engine answers, else `forbidden` or `failed`."""
    return render("check_engine")


def secrets_script(attempt: Attempt) -> str:
    """Returns the script that passes its input (`secrets_input`) to the container; reports `delivered` or `failed`."""
    return render("deliver_secrets", container=attempt.container, receive=load("receive_secrets"))


def secrets_input(secrets: Mapping[str, str]) -> str:
    """Returns the input of `secrets_script`: shell assignments, for any value, and a last line that marks the end."""
    assignments = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(secrets.items()))
    return f"{assignments}# end\n"


def observe_script(
    container: str, since: str | None, *, patience: float = 0.0, tail: int | None = None, progress: bool = False
) -> str:
    """Returns the script that prints the container's state and the host's boot on one line, then the container's lines
    of progress, then its log, each line with the engine's time.

    Args:
        since: Only lines from this time on (RFC 3339, inclusive).
        patience: Seconds to wait for the container's end first.
        tail: Only so many of the last lines: an engine reads a log quickly from its end, but from a time on by reading
            all of it.
        progress: Read the lines of progress too, which takes a process in the container.
    """
    options = [*(["--tail", str(tail)] if tail is not None else []), *(["--since", since] if since else [])]
    seconds = f"{patience:.1f}" if patience else ""
    return render(
        "observe", *options, container=container, patience=seconds, log_bytes=LOG_BYTES, label_boot=LABEL_BOOT,
        progress=FILE if progress else "", read_progress=READ_PROGRESS if progress else "",
    )  # fmt: skip


def execute_script(container: str, command: Sequence[str], mark: str, *, seconds: int, held: bool) -> str:
    """Returns the script that runs a command in the running container. The script's last line is `MARK exit CODE`, or
    `MARK failed REASON`.

    Args:
        mark: A unique word; the command's environment carries it.
        seconds: Time limit of the command.
        held: End the command as soon as standard input ends.
    """
    end = load("end_command")
    return render("execute", *command, container=container, mark=mark, seconds=seconds, held=held, end=end)


def end_execution_script(container: str, mark: str) -> str:
    """Returns the script that ends a command started by `execute_script` with the same `mark`."""
    return render("end_execution", container=container, mark=mark, end=load("end_command"))


def stacks_script(container: str, native: bool = False) -> str:
    """Returns the script that prints the container's processes and each Python stack (py-spy is in our images)."""
    return render("stacks", container=container, dump=DUMP_STACKS, native="native" if native else "")


def evidence_script(container: str) -> str:
    """Returns the script that prints a container's inspection and the host's disks, memory, kernel and TPU logs."""
    return render("evidence", container=container)


def stop_script(container: str, grace: int, *, remove: bool) -> str:
    """Returns the script that stops a container (SIGTERM once, SIGKILL after `grace` seconds) and keeps start.sh from
    creating it later; it deletes one that never started, or any if `remove`. It reports `stopped`, without one too."""
    return render("stop", container=container, grace=grace, remove=remove)
