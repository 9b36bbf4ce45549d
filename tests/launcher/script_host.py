"""A host for tpu-launch's scripts: real shells; docker, curl and sudo note their calls and answer as a test says."""

import json
import os
import subprocess
from pathlib import Path

from tests.processes import PIPES

SHELLS = ("dash", "bash")

_PROGRAMS = {
    # Each call in `calls`, its first word a line in `verbs`; the words of `create` one by one in `create`. Answers: the
    # first file in `answers` whose name begins a call (with _ for a blank); without one, a `docker inspect` fails as
    # the real one does, with an empty line, and all else succeeds.
    "docker": """
echo "$*" >>"$HOST/calls"
echo "$1" >>"$HOST/verbs"
[ "$1" != create ] || printf '%s\\0' "$@" >"$HOST/create"
[ "$1" != cp ] || cp -r "$2" "$HOST/copied"
for answer in "$HOST"/answers/*; do
  name=${answer##*/}
  case "$*" in "$(echo "$name" | tr _ ' ')"*) . "$answer"; exit 0 ;; esac
done
case "$1 $2" in inspect*) echo; exit 1 ;; "image inspect") exit 1 ;; esac
exit 0
""",
    "curl": """
case "$*" in
  *agent-worker-number*) printf 3 ;;
  *token*) echo '{"access_token": "t0ken", "token_type": "Bearer"}' ;;
esac
""",
    "hostname": "echo 10.0.0.3 172.17.0.1",
    "sudo": 'shift; exec "$@"',
}


def write_program(folder: Path, name: str, shell: str = "") -> Path:
    """Writes a program of shell lines into a folder, which is made if need be. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{shell}\n")
    program.chmod(0o755)
    return program


class ScriptHost:
    """Worker 3 of a slice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "answers").mkdir(parents=True)
        for name, text in _PROGRAMS.items():
            self.replace(name, text)
        self._socket = write_program(folder, "docker.sock")  # one that this user may write to
        self.environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOST": str(folder)}

    def replace(self, program: str, shell: str) -> None:
        """Makes a program run these shell lines instead."""
        write_program(self.folder / "bin", program, shell)

    def answer(self, call: str, shell: str) -> None:
        """Makes docker calls that begin with `call` run these shell lines."""
        (self.folder / "answers" / call.replace(" ", "_")).write_text(shell)

    def answer_container(self, state: dict[str, object], created_on: str = "") -> None:
        """Makes `docker inspect --format TEMPLATE NAME` print a container of image sha256:ab, created on a boot."""
        fields = {
            "json .State": json.dumps(state),
            ".State.Status": str(state["Status"]),
            ".State.Running": json.dumps(state["Status"] == "running"),
            ".Image": "sha256:ab",
            'json (index .Config.Labels "tpu-launch.boot")': json.dumps(created_on),
            'index .Config.Labels "tpu-launch.boot"': created_on,
        }
        replacements = (f"-e 's|{{{{{field}}}}}|{value}|'" for field, value in fields.items())
        self.answer("inspect --format", f"""printf '%s\\n' "$3" | sed {" ".join(replacements)}""")

    def popen(self, script: str, shell: str = "sh") -> "subprocess.Popen[str]":
        own = script.replace("/var/run/docker.sock", str(self._socket))
        return subprocess.Popen([shell, "-c", own], env=self.environment, text=True, **PIPES)

    def run(self, script: str, shell: str = "sh", stdin: str = "") -> str:
        """Runs a script, which must print no error. Returns its output."""
        process = self.popen(script, shell)
        out, err = process.communicate(stdin, timeout=30)
        assert err == ""
        assert process.returncode in (0, 1)
        return out

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def verbs(self) -> list[str]:
        """Returns the first word of each docker call; the other words may hold line ends."""
        path = self.folder / "verbs"
        return path.read_text().split() if path.exists() else []

    @property
    def created(self) -> list[str]:
        """Returns the arguments of `docker create`."""
        return (self.folder / "create").read_bytes().decode().split("\0")[:-1]
