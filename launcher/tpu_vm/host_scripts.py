"""The shell scripts that hosts run: each rendered into a single command line, and the parsers of their output. Pure.

A remote command is one string, carried by ssh: nothing is copied to a host before. `render` puts parameters as quoted
assignments in front of the script's text, never into the code. A line `. ./NAME.sh` includes another script of the
folder `scripts`; comment lines are left out.

A script reports on one line a host, `tpu-launch <worker> <word> <detail>`, mixed with the lines of other hosts and of
gcloud. `observe.sh` prints a container's state and log instead, and runs on one host at a time.

Rules for the scripts:
- POSIX sh, checked by shellcheck; a script names its parameters at the top (`: "${name:?}"`);
- short and idempotent: gcloud runs the whole command again when ssh, or the command, returns 255;
- never ends with 255;
- secrets and data come by standard input, never as parameters: arguments are visible to every process of a host.
"""

import base64
import functools
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from launcher.container_output import (
    DUMP_STACKS,
    LINE_BYTES,
    READ_PROGRESS,
    LogWindow,
    docker_records,
    read_log,
    split_progress,
)
from launcher.images.repositories import is_google
from launcher.provider import (
    COMPILE_CACHE_FOLDER,
    DELIVERY_SECONDS,
    LOG_OVERLAP,
    Attempt,
    ContainerState,
    HostReport,
    Observation,
    compile_cache_environment,
)
from training.accelerators import accelerator
from training.machine import parse_time, shift
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

MOVED = "moved"  # begins the detail of a host that has other addresses than the launcher knows
FORBIDDEN = "forbidden"  # begins the detail of a host whose engine this user may not use
_CLOCK_SECONDS = 30.0  # hosts that differ more spoil tokens, certificates, and the order of log lines


def render(name: str, *arguments: str, **parameters: str | int | float | bool) -> str:
    """Returns the text of `scripts/NAME.sh` with its positional arguments and its parameters, which become shell
    variables; a boolean becomes `yes` or `no`."""
    words = {True: "yes", False: "no"}
    texts = {key: words[value] if isinstance(value, bool) else str(value) for key, value in parameters.items()}
    assignments = [f"{key}={shlex.quote(text)}\n" for key, text in texts.items()]
    if arguments:
        assignments.append(f"set -- {shlex.join(arguments)}\n")
    return "".join(assignments) + load_script(name)


@functools.cache
def load_script(name: str) -> str:
    """Returns the text of `scripts/NAME.sh`, includes in place, without comments; sets no parameters. Cached."""
    text = (resources.files(__package__) / f"scripts/{name}.sh").read_text(encoding="utf-8")
    code = re.sub(r"^[ \t]*#.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^[ \t]*\. \./(\w+)\.sh\n", lambda include: load_script(include[1]), code, flags=re.MULTILINE)


def create_arguments(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> list[str]:
    """Returns the arguments of `docker create` on every host, with image and command; each host adds TPU_WORKER_ID.
    Where `attempt.waits`, the command begins only after secrets and overlay were delivered into the container. `hosts`:
    their addresses, in worker order."""
    arguments = ["--name", attempt.container, "--label", f"{LABEL_RUN}={attempt.run_id}"]
    arguments += ["--label", f"{LABEL_ATTEMPT}={attempt.number}", "--entrypoint", ""]  # the command runs, as on GKE
    arguments += ["--privileged", "--network", "host", "--init", *_KEPT_LOG]
    arguments += ["--shm-size", attempt.shm_size, "--ulimit", "memlock=-1:-1"]
    if attempt.compile_cache_gb:
        arguments += ["--volume", f"{_PROGRAMS_VOLUME}:{COMPILE_CACHE_FOLDER}"]
    # For the engine's own stops: without it, a container has 10 s when its host shuts down.
    arguments += ["--stop-timeout", str(attempt.stop_seconds)]
    # Root: only root has capabilities in a privileged container, and the drivers of v2 to v4 map a chip's memory only
    # for CAP_SYS_ADMIN (kernel, drivers/staging/gasket/gasket_core.c).
    arguments += ["--user", attempt.user or "0"]
    environment = {
        "PJRT_DEVICE": "TPU",
        "TPU_LAUNCH_RUN_ID": attempt.run_id,
        "TPU_LAUNCH_ATTEMPT": str(attempt.number),
        "TPU_ACCELERATOR_TYPE": accelerator_type,
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
        FILE_VARIABLE: FILE,
        **compile_cache_environment(attempt.compile_cache_gb),
        **attempt.environment,  # overrides ours
    }
    for key, value in environment.items():
        arguments += ["--env", f"{key}={value}"]
    if not attempt.waits(len(hosts)):
        return [*arguments, attempt.image, *attempt.command]
    tmpfs = ["--tmpfs", f"{_SECRETS_FOLDER}:mode=1777,size=1m"]
    wait = render("await_secrets", seconds=math.ceil(attempt.start_seconds) + DELIVERY_SECONDS)
    return [*arguments, *tmpfs, attempt.image, "sh", "-c", wait, "sh", *attempt.command]


def start_script(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> str:
    """Returns the script that removes containers of older attempts, pulls the image, creates the container and starts
    it unless it ran already. It reports `started <image id> <Unix seconds> <huge pages>`, `moved` (the host has another
    address than in `hosts`), `busy <run id>` or `failed <reason>`. It pulls an image named by digest unless the host
    has it, with the token of the host's service account from Google's registries and without credentials from others.
    An image named by its id must be on the host. It switches on transparent huge pages where they help; without
    permission, it reports their setting."""
    registry = attempt.image.split("/")[0]
    needs_huge_pages = accelerator(accelerator_type).generation.name not in _WITHOUT_HUGE_PAGES
    assert all(re.fullmatch(r"[\w.-]+", name) for name in attempt.files), attempt.files.keys()
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
        list_holders=load_script("list_tpu_holders"),
        huge_pages=HUGE_PAGES if needs_huge_pages else "",
        pull="@" in attempt.image,
        registry=registry if is_google(registry) else "",
        files="\n".join(f"{name} {base64.b64encode(data).decode()}" for name, data in attempt.files.items()),
    )


def overlay_script(attempt: Attempt) -> str:
    """Returns the script that unpacks its input, `attempt.overlay.archive` in base64, in the created container, whose
    command waits; it reports `copied` or `failed <reason>`. `attempt.overlay` must not be None."""
    overlay = attempt.overlay
    assert overlay is not None
    return render("copy_overlay", container=attempt.container, target=overlay.target, digest=overlay.digest)


def secrets_script(attempt: Attempt) -> str:
    """Returns the script that passes its input (`secrets_input`) to the container; reports `delivered` or `failed`."""
    return render("deliver_secrets", container=attempt.container, receive=load_script("receive_secrets"))


def secrets_input(secrets: Mapping[str, str]) -> str:
    """Returns the input of `secrets_script`: shell assignments, for any value, and a last line that marks the end."""
    return "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(secrets.items())) + "# end\n"


def observe_script(
    container: str, since: str | None, *, patience: float = 0.0, tail: int | None = None, progress: bool = False
) -> str:
    """Returns the script that waits up to `patience` seconds for the container's end and prints its state and the
    host's boot on one line (or only `absent`, or `no engine: REASON`), then with `progress` its lines of progress
    (which takes a process in the container), then its log from `since` (RFC 3339, inclusive; None: its begin) on, each
    line with the engine's time, cut after LOG_BYTES. `tail`: only the last lines, which an engine finds quickly: it
    finds a time by reading the whole log. With `tail`, a host whose clock is before `since` ignores `since`."""
    options = [*(["--tail", str(tail)] if tail is not None else []), *(["--since", since] if since else [])]
    seconds = f"{patience:.1f}" if patience else ""
    return render(
        "observe", *options, container=container, patience=seconds, log_bytes=LOG_BYTES, label_boot=LABEL_BOOT,
        progress=FILE if progress else "", read_progress=READ_PROGRESS if progress else "",
    )  # fmt: skip


def execute_script(container: str, command: Sequence[str], mark: str, *, seconds: int, held: bool) -> str:
    """Returns the script that runs a command in the running container for `seconds` at most; with `held`, it ends the
    command as soon as standard input ends. The script's last line is `MARK exit CODE`, or `MARK failed REASON`. `mark`:
    a unique word, which the command's environment carries."""
    end = load_script("end_command")
    return render("execute", *command, container=container, mark=mark, seconds=seconds, held=held, end=end)


def end_execution_script(container: str, mark: str) -> str:
    """Returns the script that ends a command started by `execute_script` with the same `mark`."""
    return render("end_execution", container=container, mark=mark, end=load_script("end_command"))


def stacks_script(container: str, native: bool = False) -> str:
    """Returns the script that prints the container's processes and Python stacks (`native`: C's too), by py-spy."""
    return render("stacks", container=container, dump=DUMP_STACKS, native="native" if native else "")


def stop_script(container: str, grace: int, *, remove: bool) -> str:
    """Returns the script that stops a container (SIGTERM once, SIGKILL after `grace` seconds) and keeps start.sh from
    creating it later; it deletes one that never started, or any if `remove`. It reports `stopped`, without one too."""
    return render("stop", container=container, grace=grace, remove=remove)


def parse_reports(output: str, word: str, workers: Iterable[int]) -> list[HostReport]:
    """Returns a report of each worker, in order: ok if the host reported `word`, else a failure, also for a silent
    host. A `busy` host's has `occupied_by`, the id of the run there."""
    reports = {}
    for line in output.splitlines():
        if match := re.match(r"tpu-launch (\d+) (\S+) ?(.*)", line.strip()):
            worker, reported, detail = int(match[1]), match[2], match[3]
            if reported == "busy":  # a container of another run is running there; the detail is that run's id
                report = HostReport(worker, False, f"run {detail} is on this host", occupied_by=detail)
            else:
                text = detail if reported in (word, "failed") else f"{reported} {detail}"
                report = HostReport(worker, reported == word, text)
            reports[worker] = report
    return [reports.get(worker, HostReport(worker, False, "the host did not answer")) for worker in workers]


def has_reports(output: str) -> bool:
    """Returns whether any host reported anything."""
    return re.search(r"^[ \t]*tpu-launch \d+ \S", output, re.MULTILINE) is not None


def start_warnings(time: int, pages: str, begin: float, end: float) -> Iterator[str]:
    """Yields warnings: if the host's `time`, read between `begin` and `end` of the workstation's clock (all Unix
    seconds), is over 30 s off, and on `pages`, start.sh's setting of huge pages, unless "" (it is right)."""
    skew = max(begin - time - 1, time - end - 1)
    if skew > _CLOCK_SECONDS:
        yield f"its clock is {skew:.0f} s off the workstation's; sudo systemctl restart chrony, on that host"
    if pages:
        fix = "echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled, on that host"
        yield f"transparent huge pages are off ({pages}) and can't be switched on: starts take longer; {fix}"


def parse_state(line: str) -> ContainerState | None:
    """Returns the state in the first line of `observe.sh`, JSON or "absent" (no container); None if no engine answers.
    `rebooted`: the container was created on an earlier boot of the host. Only an ended container has an exit code."""
    if line == "absent":
        return ContainerState("absent")
    if not line.startswith("{"):
        return None
    summary: Mapping[str, Any] = json.loads(line)
    state: Mapping[str, object] = summary["state"]
    ended = state.get("Status") in ("exited", "dead")
    finished_at = str(state.get("FinishedAt", "")) if ended else ""
    finished = parse_time(finished_at)
    rebooted = summary["created_on"] != summary["boot"]
    return ContainerState(
        status=str(state.get("Status", "")),
        exit_code=int(str(state.get("ExitCode", 0))) if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        started_at=str(state.get("StartedAt", "")),
        finished_at=finished_at,
        error=str(state.get("Error", "")),
        rebooted=rebooted,
        # Of a container that the host took down, the engine writes the end at the next boot; some omit it (the year 1).
        ended_before_reboot=rebooted and finished is not None and 0 < finished < summary["booted"],
    )


def parse_observation(worker: int, output: str) -> tuple[Observation, LogWindow]:
    """Returns the observation in the output of `observe.sh` (surrogates: bytes that are not UTF-8), and its log; if the
    engine does not answer, one with a `problem` and no lines. Output cut at LOG_BYTES sets its `more`."""
    first, _, rest = output.partition("\n")
    state = parse_state(first.strip())
    progress, rest = split_progress(rest)  # log lines begin with a time
    data = rest.encode(errors="surrogateescape")
    cut = len(data) >= LOG_BYTES
    window = read_log(data, docker_records, complete=state is not None and state.ended and not cut)
    if state is None:
        reason = first.partition("no engine")[2].rstrip()
        return Observation(worker, None, problem=f"its container engine does not answer{reason}"), window
    return Observation(worker, state, window.lines, more=cut, open=window.open, progress=progress), window


def covers(window: LogWindow, since: str, tail: int) -> bool:
    """Returns whether `window`, read from the last `tail` records of a log, has every record from `since` on (RFC 3339,
    as `Cursor.since`): it has fewer than `tail`, which docker counts before it leaves out those before `since`, and
    begins at a line that is known already, at most LOG_OVERLAP after `since`."""
    return 0 < window.records < tail and window.first <= shift(since, LOG_OVERLAP)
