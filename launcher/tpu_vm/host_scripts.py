"""The shell scripts that hosts run, and what their output means. Pure: text in, text out.

Rules that every script keeps (gcloud replays a whole remote command when ssh, or the command, returns 255):
* short and idempotent: a replay finds the work done and says the same again;
* never ends with 255;
* reports on one line that carries its worker index, because gcloud mixes the hosts' output: `tpu-launch <worker> <word>
  <detail>`.
Docker may need sudo where a fresh login is not yet in its group.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from launcher.provider import Attempt, ContainerState, HostReport, LogLine, Observation
from launcher.tpu_vm.ssh import start_gate as starting

LABEL_RUN = "tpu-launch.run"
LABEL_ATTEMPT = "tpu-launch.attempt"

LOG_BYTES = 4_000_000  # of one look: bounds memory and time, not what is delivered

# Secrets reach the command as environment variables, by standard input into the container's own memory: no argument, no
# file on a disk and no `docker inspect` holds them. The command waits for them, takes them, and removes them.
_SECRETS = "/run/tpu-launch"
_WAIT_FOR_SECRETS = (
    f"cd {_SECRETS} || exit 1; i=0; "
    "while [ ! -e ready ]; do i=$((i+1)); "
    'if [ $i -gt 1200 ]; then echo "tpu-launch: the secrets of this run did not arrive within 120 s" >&2; exit 1; fi; sleep 0.1; done; '
    '. ./secrets; rm -f secrets; : > taken; cd "$OLDPWD"; exec "$@"'
)

_PRELUDE = """\
set -u
docker=docker
[ -w /var/run/docker.sock ] || docker='sudo -n docker'
worker=$(curl -sf --max-time 10 -H 'Metadata-Flavor: Google' http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number)
say() { echo "tpu-launch ${worker:-?} $*"; }
"""


def docker_create(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> list[str]:
    """The `docker create` of one host; `$worker` is the shell's."""
    command = [
        "create",
        "--name",
        attempt.container,
        "--label",
        f"{LABEL_RUN}={attempt.run_id}",
        "--label",
        f"{LABEL_ATTEMPT}={attempt.number}",
    ]
    command += [
        "--privileged",
        "--network",
        "host",
        "--init",
        "--shm-size",
        attempt.shm_size,
        "--ulimit",
        "memlock=-1:-1",
    ]
    if attempt.user:
        command += ["--user", attempt.user]
    for key, value in environment(attempt, hosts, accelerator_type).items():
        command += ["--env", f"{key}={value}"]
    if not attempt.secrets:
        return [*command, attempt.image, *attempt.command]
    return [
        *command,
        "--tmpfs",
        f"{_SECRETS}:mode=1777,size=1m",
        attempt.image,
        "sh",
        "-c",
        _WAIT_FOR_SECRETS,
        "sh",
        *attempt.command,
    ]


def environment(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> dict[str, str]:
    """What every host's container is told, apart from its worker index (TPU_WORKER_ID, which the host itself knows)."""
    return {
        "PJRT_DEVICE": "TPU",
        "TPU_LAUNCH_RUN_ID": attempt.run_id,
        "TPU_LAUNCH_ATTEMPT": str(attempt.number),
        "TPU_ACCELERATOR_TYPE": accelerator_type,
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
        **attempt.environment,
    }


def prepare_script(attempt: Attempt, hosts: Sequence[str], accelerator_type: str) -> str:
    """Gets the image, refuses a host that another run uses, removes this run's earlier attempts, and makes the
    container.

    Reports `ready <image id>`, or `busy`/`failed` with the reason.
    """
    create = " ".join(shlex.quote(word) for word in docker_create(attempt, hosts, accelerator_type))
    create = create.replace("create ", 'create --env TPU_WORKER_ID="$worker" ', 1)
    name, image, run_id = shlex.quote(attempt.container), shlex.quote(attempt.image), shlex.quote(attempt.run_id)
    pull = (
        [f"if ! $docker image inspect {image} >/dev/null 2>&1; then", *_pull(attempt.image), "fi"]
        if "@" in attempt.image
        else ["true"]
    )
    lines = [
        _PRELUDE,
        'if [ -z "$worker" ]; then say failed "the metadata server does not tell the worker index"; exit 1; fi',
        'folder=$(mktemp -d) && errors=$folder/errors && trap \'rm -rf "$folder" "${login:-}"\' EXIT',
        'fail() { say failed "$1: $(tr "\\n" " " < "$errors" | tail -c 600)"; exit 1; }',
        f"runs=$($docker ps --all --filter label={LABEL_RUN} --format '{{{{.Label \"{LABEL_RUN}\"}}}} {{{{.Names}}}} {{{{.State}}}}')",
        "while read -r run old state; do",
        # Somebody else's run is never touched.
        f'  if [ "$run" != {run_id} ]; then [ "$state" != running ] || {{ say busy "$run"; exit 1; }}',
        f'  elif [ "$old" != {name} ]; then $docker rm --force "$old" >/dev/null 2>&1 </dev/null; fi',
        "done <<EOF",
        "$runs",
        "EOF",
        f"if ! $docker inspect {name} >/dev/null 2>&1; then",
        *pull[:-1],
        pull[-1] + ' || fail "the image can not be pulled"',
        f'  $docker {create} >/dev/null 2>"$errors" || fail "the container can not be created"',
        "fi",
    ]
    if attempt.files:
        lines.append('umask 022 && mkdir "$folder/tpu-launch"')
        for file_name, content in attempt.files.items():
            encoded = base64.b64encode(content).decode()
            lines.append(f'base64 -d > "$folder/tpu-launch/"{shlex.quote(file_name)} <<EOF\n{encoded}\nEOF')
        lines.append(
            f'$docker cp "$folder/tpu-launch" {name}:/etc/ >/dev/null 2>"$errors" || fail "the configuration can not be copied into the container"'
        )
    lines.append(f"say ready \"$($docker inspect --format '{{{{.Image}}}}' {name})\"")
    return "\n".join(lines) + "\n"


def _pull(image: str) -> list[str]:
    """Gets an image. For Google's registries docker shows the token of the host's own service account, from a folder
    that goes again."""
    name, registry = shlex.quote(image), image.split("/")[0]
    if not registry.endswith(("pkg.dev", "gcr.io")):
        return [f'  $docker pull --quiet {name} >/dev/null 2>"$errors"']
    token = "http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token"
    return [
        "  login=$(mktemp -d)",
        f'  curl -sf --max-time 10 -H \'Metadata-Flavor: Google\' {token} | sed \'s/.*"access_token" *: *"\\([^"]*\\)".*/\\1/\' |',
        f'    $docker --config "$login" login --username oauth2accesstoken --password-stdin https://{shlex.quote(registry)} >/dev/null 2>&1',
        f'  $docker --config "$login" pull --quiet {name} >/dev/null 2>"$errors"',
    ]


def overlay_script(attempt: Attempt) -> str:
    """Unpacks its standard input (base64) over a folder of the prepared container. Reports `laid` and the hash of what
    was received."""
    assert attempt.overlay is not None
    name, target = shlex.quote(attempt.container), shlex.quote(attempt.overlay.target)
    failed = f'say failed "the overlay can not be laid over "{target}": $errors"; exit 1'
    lines = [
        _PRELUDE.replace("curl -sf", "curl -sf </dev/null", 1),
        "folder=$(mktemp -d) && trap 'rm -rf \"$folder\"' EXIT",
        'base64 -d > "$folder/overlay"',
        "hash=$(sha256sum \"$folder/overlay\" | cut -d' ' -f1)",
        f'errors=$(gzip -dc "$folder/overlay" | $docker cp - {name}:{target} 2>&1 >/dev/null) || {{ {failed}; }}',
        'say laid "$hash"',
    ]
    return "\n".join(lines) + "\n"


def up_script() -> str:
    """Reports `up` when the host's engine answers."""
    return (
        _PRELUDE
        + '$docker version >/dev/null 2>&1 && say up || say failed "its container engine does not answer yet"\n'
    )


def start_script(attempt: Attempt, *, gated: bool = False) -> str:
    """Starts the prepared container; one that runs or has run already is left alone. Reports `started`, or `failed`
    with the reason.

    With `gated`, a container that has not started waits for `go_script`, and is reported as `waiting` when that did not
    come.
    """
    name = shlex.quote(attempt.container)
    status = f"$docker inspect --format '{{{{.State.Status}}}}' {name} 2>/dev/null"
    lines = [
        _PRELUDE,
        *(starting.gate_lines(attempt.container, status) if gated else []),
        f"status=$({status})",
        f'if [ -z "$status" ]; then say failed "there is no container "{name}; exit 1; fi',
        'if [ "$status" = created ]; then',
        f"  error=$($docker start {name} 2>&1 >/dev/null)",
        '  if [ $? -ne 0 ]; then say failed "the container can not be started: $(echo $error | tail -c 600)"; exit 1; fi',
        "fi",
        "say started",
    ]
    return "\n".join(lines) + "\n"


def go_script(attempt: Attempt) -> str:
    """Lets the gated start of a host go on. Reports `go`."""
    return starting.go_script(_PRELUDE, attempt.container)


def secrets_script(attempt: Attempt) -> str:
    """Passes its standard input (`secrets_input`) on into the started container, once. Reports `given`."""
    name = shlex.quote(attempt.container)
    inside = f"cd {_SECRETS} && if [ -e taken ]; then cat > /dev/null; else umask 077 && cat > secrets && : > ready; fi"
    return (
        _PRELUDE.replace("curl -sf", "curl -sf </dev/null", 1)
        + f'$docker exec --interactive {name} sh -c {shlex.quote(inside)} || {{ say failed "the secrets can not be passed on"; exit 1; }}\n'
        + "say given\n"
    )


def secrets_input(secrets: Mapping[str, str]) -> str:
    """What `secrets_script` reads: shell lines, so that any value survives."""
    return "".join(f"export {key}={shlex.quote(value)}\n" for key, value in sorted(secrets.items()))


def observe_script(container: str, since: str | None, *, patience: float = 0.0, tail: int | None = None) -> str:
    """Prints the container's state on one line, then its log from `since` on, each line with the engine's time.

    Waits for its end before, for `patience` seconds at most. With `tail`, only so many of the last lines: an engine
    reads a log from its end quickly, and from a time on by reading all of it.
    """
    name = shlex.quote(container)
    window = (f"--tail {tail} " if tail else "") + (f"--since {shlex.quote(since)} " if since else "")
    lines = [
        "docker=docker",
        "[ -w /var/run/docker.sock ] || docker='sudo -n docker'",
        *([f"timeout {patience:.1f} $docker wait {name} >/dev/null 2>&1"] if patience else []),
        f"if $docker inspect --format '{{{{json .State}}}}' {name} 2>/dev/null; then",
        f"  $docker logs --timestamps {window}{name} 2>&1 | head -c {LOG_BYTES}",
        "elif $docker version >/dev/null 2>&1; then echo absent",
        "else echo no engine",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def stacks_script(container: str) -> str:
    """Prints the stack of every Python process of the container (py-spy is in our images), and its process list."""
    name = shlex.quote(container)
    inside = (
        "for p in /proc/[0-9]*; do case $(readlink $p/exe) in *python*) "
        "py-spy dump --nonblocking --pid ${p#/proc/} 2>&1 || { cat $p/comm $p/wchan $p/status | head -n 12; } ;; esac; done"
    )
    return (
        "docker=docker\n[ -w /var/run/docker.sock ] || docker='sudo -n docker'\n"
        f"$docker top {name} 2>&1\n"
        f"$docker exec --user 0 {name} sh -c {shlex.quote(inside)} 2>&1\n"
    )


def evidence_script(container: str) -> str:
    """Prints what a host knows of a container that failed: inspection, disks, memory, kernel messages, TPU logs of the
    container and of the host."""
    name = shlex.quote(container)
    parts = {
        "container": f"$docker inspect {name}",
        "containers": "$docker ps --all",
        "disks": "df -h",
        "memory": "cat /proc/meminfo /proc/loadavg",
        "kernel": "sudo -n dmesg | tail -n 200",
        "TPU logs of the container": f"$docker cp {name}:/tmp/tpu_logs - | tar -xO | tail -c 1000000",
        "TPU logs of the host": 'for log in /tmp/tpu_logs/*; do echo "== $log"; tail -c 200000 "$log"; done',
    }
    lines = ["docker=docker", "[ -w /var/run/docker.sock ] || docker='sudo -n docker'"]
    for title, command in parts.items():
        lines += [f"echo '=== {title}'", f"{{ {command}; }} 2>&1"]
    return "\n".join([*lines, "exit 0"]) + "\n"


def stop_script(container: str, grace: int, *, remove: bool) -> str:
    """SIGTERM once, SIGKILL after `grace` seconds; a container that has ended or is gone is fine. Reports `stopped`.

    A replay, or a second stop, must not send a second SIGTERM, which tells the trainer to leave without saving: it
    waits, and kills in the end.
    """
    name = shlex.quote(container)
    mark = shlex.quote(f"/tmp/{container}.") + '"$worker.stopping"'
    lines = [
        _PRELUDE,
        f"if $docker inspect {name} >/dev/null 2>&1; then",
        f"  if mkdir {mark} 2>/dev/null; then $docker stop --time {grace} {name} >/dev/null 2>&1",
        f"  else timeout {grace} $docker wait {name} >/dev/null 2>&1 || $docker kill {name} >/dev/null 2>&1; fi",
        f"  if [ \"$($docker inspect --format '{{{{.State.Running}}}}' {name} 2>/dev/null)\" = true ]; then",
        '    say failed "the container can not be stopped"; exit 1',
        "  fi",
        *([f"  $docker rm --force {name} >/dev/null 2>&1"] if remove else []),
        "fi",
        *([f"rmdir {mark} 2>/dev/null"] if remove else []),
        "say stopped",
    ]
    return "\n".join(lines) + "\n"


def parse_reports(output: str, word: str, workers: Iterable[int]) -> list[HostReport]:
    """What every host answered: ok when it said `word`. A host that said nothing is reported as such."""
    said: dict[int, tuple[str, str]] = {}
    for line in output.splitlines():
        match = re.match(r"tpu-launch (\d+) (\S+) ?(.*)", line.strip())
        if match:
            said[int(match.group(1))] = (match.group(2), match.group(3))
    reports = []
    for worker in workers:
        verb, detail = said.get(worker, ("silent", "the host did not answer"))
        if verb == "busy":
            reports.append(HostReport(worker, False, f"run {detail} is on this host", occupied_by=detail))
            continue
        reports.append(
            HostReport(
                worker,
                verb == word,
                detail if verb == word else f"{detail}" if verb in ("failed", "silent") else f"{verb} {detail}",
            )
        )
    return reports


def parse_state(line: str) -> ContainerState | None:
    """The first line of `observe_script`; None when the host's engine does not answer."""
    if line == "absent":
        return ContainerState("absent")
    if not line.startswith("{"):
        return None
    state: Mapping[str, object] = json.loads(line)
    ended = state.get("Status") in ("exited", "dead")
    return ContainerState(
        status=str(state.get("Status", "")),
        exit_code=int(str(state.get("ExitCode", 0))) if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        started_at=str(state.get("StartedAt", "")),
        finished_at=str(state.get("FinishedAt", "")) if ended else "",
        error=str(state.get("Error", "")),
    )


def parse_observation(worker: int, output: str) -> Observation:
    """What `observe_script` printed. A last line that was cut in the middle is left for the next look."""
    first, _, rest = output.partition("\n")
    state = parse_state(first.strip())
    if state is None:
        return Observation(worker, None, problem="its container engine does not answer")
    cut = len(rest.encode(errors="replace")) >= LOG_BYTES
    lines = rest.split("\n")  # and on nothing else: progress bars write \r, text may hold U+2028
    last = lines.pop()
    if last and not cut:
        lines.append(last)  # the engine's last line may lack its end
    parsed = [_log_line(line) for line in lines if line]
    return Observation(worker, state, tuple(parsed), more=cut)


def _log_line(line: str) -> LogLine:
    timestamp, _, text = line.partition(" ")
    return LogLine(timestamp, text.rstrip("\r")) if re.match(r"\d{4}-\d\d-\d\dT", timestamp) else LogLine("", line)
