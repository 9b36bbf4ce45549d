"""The scripts of `scripts/` with what an attempt gives them: one function for each command that a host is given.

Pure: an attempt in, the text of a remote command out. What the output means is in `host_output`.
"""

from __future__ import annotations

import base64
import math
import re
import shlex
from collections.abc import Mapping, Sequence

from launcher.provider import DELIVERY_SECONDS, Attempt
from launcher.tpu_vm.scripts import load, render
from training.accelerators import accelerator

LABEL_RUN = "tpu-launch.run"
LABEL_ATTEMPT = "tpu-launch.attempt"
LABEL_BOOT = "tpu-launch.boot"  # the boot of the host on which the container was created; the host adds it

LOG_BYTES = 4_000_000  # of one observation: bounds memory and time, not what is delivered

HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_WITHOUT_HUGE_PAGES = ("v2", "v3", "v4")

# A volume of the host's engine, which it makes when it is first mounted, and which outlives containers.
_PROGRAMS_VOLUME = "tpu-launch-compiled-programs"
_PROGRAMS_FOLDER = "/var/cache/tpu-launch"  # in the container; our images have it, as the trainer's user's

_SECRETS_FOLDER = "/run/tpu-launch"  # in the container; await_secrets.sh and receive_secrets.sh name it too


def create_arguments(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> list[str]:
    """The arguments of `docker create` on every host, apart from TPU_WORKER_ID, which the host adds."""
    arguments = ["--name", attempt.container]
    arguments += ["--label", f"{LABEL_RUN}={attempt.run_id}", "--label", f"{LABEL_ATTEMPT}={attempt.number}"]
    arguments += ["--privileged", "--network", "host", "--init"]
    arguments += ["--shm-size", attempt.shm_size, "--ulimit", "memlock=-1:-1"]
    if attempt.compile_cache_gb:
        arguments += ["--volume", f"{_PROGRAMS_VOLUME}:{_PROGRAMS_FOLDER}"]
    # Of the engine's own stops too: when its host shuts down, a container has 10 s without it.
    arguments += ["--stop-timeout", str(attempt.stop_seconds)]
    if attempt.user:
        arguments += ["--user", attempt.user]
    for key, value in container_environment(attempt, hosts, accelerator_type).items():
        arguments += ["--env", f"{key}={value}"]
    if not attempt.all_secrets(len(hosts)):
        return [*arguments, attempt.image, *attempt.command]
    tmpfs = ["--tmpfs", f"{_SECRETS_FOLDER}:mode=1777,size=1m"]
    wait = render("await_secrets", seconds=math.ceil(attempt.start_seconds) + DELIVERY_SECONDS)
    return [*arguments, *tmpfs, attempt.image, "sh", "-c", wait, "sh", *attempt.command]


def container_environment(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> dict[str, str]:
    """The environment of every host's container, apart from TPU_WORKER_ID."""
    cache = {
        "TPU_LAUNCH_COMPILE_CACHE": _PROGRAMS_FOLDER,
        "TPU_LAUNCH_COMPILE_CACHE_GB": f"{attempt.compile_cache_gb:g}",
    }
    return {
        "PJRT_DEVICE": "TPU",
        "TPU_LAUNCH_RUN_ID": attempt.run_id,
        "TPU_LAUNCH_ATTEMPT": str(attempt.number),
        "TPU_ACCELERATOR_TYPE": accelerator_type,
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
        **(cache if attempt.compile_cache_gb else {}),
        **attempt.environment,
    }


def huge_pages_file(accelerator_type: str) -> str:
    """The kernel's switch of transparent huge pages, where they make libtpu start faster (v5e and newer, says JAX's
    warning at start-up); else ""."""
    return "" if accelerator(accelerator_type).generation.name in _WITHOUT_HUGE_PAGES else HUGE_PAGES


def prepare_script(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> str:
    """Pulls the image and creates the container. Reports `ready <image id>`, `busy <run id>` or `failed <reason>`.

    An image that is named by digest is pulled unless the host has it; one that is named by its id must be there.
    Google's registries are shown the token of the host's own service account, any other one nothing. Where transparent
    huge pages are of use and off, they are switched on if the host lets us.
    """
    registry = attempt.image.split("/")[0]
    return render(
        "prepare",
        *create_arguments(attempt, hosts, accelerator_type),
        container=attempt.container,
        image=attempt.image,
        run_id=attempt.run_id,
        attempt=attempt.number,
        label_run=LABEL_RUN,
        label_attempt=LABEL_ATTEMPT,
        label_boot=LABEL_BOOT,
        huge_pages=huge_pages_file(accelerator_type),
        pull="@" in attempt.image,
        registry=registry if registry.endswith(("pkg.dev", "gcr.io")) else "",
        files="\n".join(_file_line(name, content) for name, content in attempt.files.items()),
    )


def _file_line(name: str, content: bytes) -> str:
    assert re.fullmatch(r"[\w.-]+", name), name
    return f"{name} {base64.b64encode(content).decode()}"


def overlay_script(attempt: Attempt) -> str:
    """Unpacks its standard input (base64) in the prepared container. Reports `copied <sha256>` or `failed <reason>`."""
    assert attempt.overlay is not None
    return render("copy_overlay", container=attempt.container, target=attempt.overlay.target)


def check_engine_script() -> str:
    """Reports `up` when the host's container engine answers."""
    return render("check_engine")


def start_script(attempt: Attempt) -> str:
    """Starts the prepared container. Reports `started`, `busy <run id>` or `failed <reason>`."""
    return render(
        "start", container=attempt.container, run_id=attempt.run_id, label_run=LABEL_RUN, label_boot=LABEL_BOOT
    )


def secrets_script(attempt: Attempt) -> str:
    """Passes its standard input (`secrets_input`) on into the started container, once. Reports `delivered`."""
    return render("deliver_secrets", container=attempt.container, receive=load("receive_secrets"))


def secrets_input(secrets: Mapping[str, str]) -> str:
    """The standard input of `secrets_script`: shell assignments, so that any value survives, and a last line by which
    the host knows that nothing was cut off."""
    assignments = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(secrets.items()))
    return f"{assignments}# end\n"


def observe_script(container: str, since: str | None, *, patience: float = 0.0, tail: int | None = None) -> str:
    """Prints the container's state and the host's boot on one line, then the log, each line with the engine's time.

    Args:
        container: its name.
        since: only lines from this time on (RFC 3339, inclusive).
        patience: seconds to wait for the container's end before it is looked at.
        tail: only so many of the last lines. An engine reads a log from its end quickly, and from a time on by reading
            all of it.
    """
    options = [*(["--tail", str(tail)] if tail else []), *(["--since", since] if since else [])]
    seconds = f"{patience:.1f}" if patience else ""
    return render(
        "observe", *options, container=container, patience=seconds, log_bytes=LOG_BYTES, label_boot=LABEL_BOOT
    )


def execute_script(container: str, command: Sequence[str], mark: str, *, seconds: int, held: bool) -> str:
    """Runs a command in the running container. Its last line is `MARK exit CODE`, or `MARK failed REASON`.

    Args:
        container: its name.
        command: program and arguments.
        mark: a word that nothing else prints; the command's environment carries it.
        seconds: after which the command is ended.
        held: whether the command is ended as soon as standard input ends.
    """
    end = load("end_command")
    return render("execute", *command, container=container, mark=mark, seconds=seconds, held=held, end=end)


def end_execution_script(container: str, mark: str) -> str:
    """Ends a command that `execute_script` began."""
    return render("end_execution", container=container, mark=mark, end=load("end_command"))


def stacks_script(container: str) -> str:
    """Prints the container's process list, and the stack of each of its Python processes (py-spy is in our images)."""
    return render("stacks", container=container, dump=load("dump_stacks"))


def evidence_script(container: str) -> str:
    """Prints what a host knows of a container that failed: inspection, disks, memory, kernel messages, TPU logs."""
    return render("evidence", container=container)


def stop_script(container: str, grace: int, *, remove: bool) -> str:
    """SIGTERM once, SIGKILL after `grace` seconds; a container that has ended or is gone is fine. Reports `stopped`."""
    return render("stop", container=container, grace=grace, remove=remove)
