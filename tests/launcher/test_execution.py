"""Claims about `tpu-launch exec` and `notebook`: what a host's shell makes of a command, and the launcher of answers.

Shells, processes and signals are real; docker and Jupyter are scripts that run here.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest

from launcher.cli import live
from launcher.cli.live import remote_script
from launcher.errors import BadInput, Exit, LaunchError
from launcher.provider import CommandReport
from launcher.providers import this_machine
from launcher.run import events, execution
from launcher.tpu_vm import host_scripts
from launcher.tpu_vm.connections import ConnectionPool
from launcher.tpu_vm.execution import Execution
from launcher.workstation import Address, ConnectionFailed
from tests.launcher.script_host import ScriptHost, write_program
from tests.launcher.test_runs import Workstation, detach
from tests.processes import wait_until
from training.machine import Clock

LONG = 100_000 + os.getpid()  # seconds of commands that are found by them: other test processes have others

# Runs what `docker exec` is given as a process of its own; the environment is that of `--env`.
DOCKER = """
case $1 in
  inspect) echo "${STATUS:-running}" ;;
  exec)
    shift
    while :; do case $1 in --env) mark=$2; shift 2 ;; --user) shift 2 ;; *) break ;; esac; done
    shift
    exec env ${mark:+"$mark"} "$@"
    ;;
esac
"""


@dataclass
class Connected:
    """A connection to the host whose shell runs here."""

    host: ScriptHost
    shell: str
    is_open: bool = True

    def run(self, command: str, *, timeout: float, stdin: str | None) -> tuple[int, str, str]:
        return 0, self.host.run(command, self.shell), ""

    def follow(self, command: str, *, timeout: float, on_line: Callable[[str], None]) -> int:
        assert timeout >= 20, "a host needs time to connect, and to report the end"
        script = command.removeprefix("sh -c ")
        process = self.host.popen(f"exec {self.shell} -c {script}", self.shell)
        try:
            for line in process.stdout:
                on_line(line.rstrip("\n"))
                if line == "cut\n":
                    raise ConnectionFailed("the cable was pulled")
        finally:
            process.communicate(timeout=20)  # closes its standard input first
        return process.wait(20)

    def close(self) -> None:
        pass


@pytest.fixture
def host(tmp_path: Path) -> ScriptHost:
    host = ScriptHost(tmp_path / "host")
    host.replace("docker", DOCKER)
    return host


def run(host: ScriptHost, *command: str, seconds: float = 20, shell: str = "sh") -> tuple[list[str], int | None, str]:
    """Runs a command on one host. Returns its lines, its exit code, and the problem."""
    machine = replace(this_machine(), connect=lambda address: Connected(host, shell))
    pool = ConnectionPool([Address(0, "h", "me", "key", "known", "h")], machine)
    connections: Any = Mock(open_pool=lambda: pool, gcloud_only=False)
    on_line = Mock()
    (report,) = Execution(connections, machine, "demo-0", command, seconds=seconds, on_line=on_line).run([0])
    return [call.args[1] for call in on_line.call_args_list], report.exit_code, report.problem


def wait_until_gone(word: str) -> None:
    """Waits until no process whose command begins with `word` is left."""
    ps = ["ps", "-eo", "args"]
    wait_until(lambda: f"\n{word}" not in subprocess.run(ps, capture_output=True, text=True, check=True).stdout, 60)


def test_lines_and_the_exit_code_come_as_the_command_wrote_them(host: ScriptHost, shell: str) -> None:
    script = 'printf "%s\n" "$1"; echo error >&2; cat; printf "no end"; exit 255'
    word = 'it\'s "$HOME"'
    assert run(host, "sh", "-c", script, "sh", word, shell=shell) == ([word, "error", "no end"], 255, "")


@pytest.mark.parametrize("begin", [f"setsid sleep {LONG}.1 & sleep {LONG}.2 & echo cut; wait",
                                   f"trap '' TERM; echo cut; sleep {LONG}.1; sleep {LONG}.2"],
                         ids=["in the background", "without SIGTERM"])  # fmt: skip
def test_a_command_ends_with_its_connection_whatever_it_has_started(host: ScriptHost, shell: str, begin: str) -> None:
    assert run(host, "sh", "-c", begin, shell=shell) == (["cut"], None, "the cable was pulled")
    wait_until_gone(f"sleep {LONG}.")  # by SIGKILL after 3 s, if it ignores SIGTERM


def test_a_command_is_ended_after_its_time_and_that_is_told(host: ScriptHost) -> None:
    ended = run(host, "sh", "-c", f"echo begun; sleep {LONG}.3", seconds=1)
    assert ended == (["begun"], None, "not done within 1 s: it was ended")
    wait_until_gone(f"sleep {LONG}.")
    assert run(host, "sh", "-c", "exit 124")[1] == 124, "it ended by itself"


@pytest.fixture
def mark() -> Iterator[str]:
    """Yields a mark of its own for a script that gcloud runs; removes it from the host's folder of marks."""
    name = f"{host_scripts.EXECUTION_MARK}test-{secrets.token_hex(8)}"
    yield name
    for path in marks(f"{name}*"):
        path.rmdir()


def marks(pattern: str) -> list[Path]:
    return [path for folder in ("/run/lock", "/tmp") for path in Path(folder).glob(pattern)]


@pytest.mark.parametrize("ended_by", ["a script of its own", "a repetition by gcloud"])
def test_a_command_through_gcloud_runs_once_and_ends(host: ScriptHost, shell: str, mark: str, ended_by: str) -> None:
    command = ["sh", "-c", f"echo ran >>{host.folder}/ran; exec sleep 5435.1"]
    script = host_scripts.execute_script("demo-0", command, mark, seconds=60, held=False)
    process = host.popen(script, shell)
    wait_until((host.folder / "ran").exists)
    if ended_by == "a script of its own":
        host.run(host_scripts.end_execution_script("demo-0", mark), shell)
    else:
        assert host.run(script, shell).startswith(f"{mark} failed the connection broke after it had begun")
    out, _ = process.communicate(timeout=20)
    assert out.splitlines()[-1] == f"{mark} exit 143"
    assert (host.folder / "ran").read_text() == "ran\n"
    (left,) = marks(mark)
    os.utime(left, (0, 0))
    other = host_scripts.execute_script("demo-0", ["true"], f"{mark}-2", seconds=60, held=False)
    assert host.run(other, shell) == f"{mark}-2 exit 0\n"
    assert not marks(mark), "marks of earlier weeks are removed"


def test_a_command_through_gcloud_that_is_interrupted_is_ended_on_its_hosts() -> None:
    connections = Mock(gcloud_only=True)
    connections.run_all_through_gcloud.side_effect = [KeyboardInterrupt, []]
    with pytest.raises(KeyboardInterrupt):
        Execution(connections, this_machine(), "demo-0", ["true"], seconds=5, on_line=print).run([0])
    begun, ended = (call.args[0] for call in connections.run_all_through_gcloud.call_args_list)
    assert "held=no" in begun
    assert ended.endswith(host_scripts.load_script("end_execution"))


def test_a_command_that_gcloud_might_repeat_does_not_run_where_no_mark_can_be_left(host: ScriptHost, mark: str) -> None:
    host.replace("mkdir", "echo mkdir: No space left on device; exit 1")
    script = host_scripts.execute_script("demo-0", ["touch", f"{host.folder}/ran"], mark, seconds=60, held=False)
    assert re.fullmatch(rf"{mark} failed it is not run, .*: mkdir: No space left on device\n", host.run(script))
    assert not (host.folder / "ran").exists()


def test_words_reach_a_host_as_they_are_and_once(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("printf", "%s|", "a  b", "$HOME", "it's", "-x", "$(id)", "`id`", "new\nline", "ü", "")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        digits = f"{mark.removeprefix(host_scripts.EXECUTION_MARK)}{hash(words)}"
        monkeypatch.setattr(secrets, "token_hex", lambda _: digits)
        return subprocess.run(["sh", "-c", remote_script(words)], capture_output=True, text=True, check=False)

    assert run("sh", "-c", "exit 255").returncode == 254, "gcloud would run it again"
    assert run("sh", "-c", "exit 3").returncode == 3
    assert run(*words).stdout == "".join(f"{word}|" for word in words[2:])
    again = run(*words)
    assert (again.returncode, again.stdout) == (254, "")
    assert "the connection broke after the command had begun" in again.stderr


@pytest.mark.parametrize(
    ("codes", "ended", "code"),
    [
        ([0, 0], [1.0, 2.0], 0),
        ([3, 4], [2.0, 1.0], 4),
        ([0, None, 7], [0.5, 1.0, 2.0], Exit.CLOUD_ERROR),
        ([7, None], [0.5, 1.0], 7),
    ],
)
def test_the_exit_code_is_of_the_host_that_failed_first(codes: list[int | None], ended: list[float], code: int) -> None:
    assert execution.exit_code(list(map(CommandReport, (0, 1, 2), codes, ended))) == code


def test_a_run_that_is_over_is_refused_and_so_is_a_host_that_is_not_there(work: Workstation) -> None:
    work.run(work.config())
    with pytest.raises(BadInput, match="is not running: its last attempt ended with 'finished'"):
        execution.execute(work.config(), work.context(), None, ["true"], host=None, seconds=5)
    work.ledger.append(events.AttemptBegan(1, image="i", command=["train"]))
    with pytest.raises(BadInput, match="--host 2: the slice has hosts 0 to 1"):
        execution.execute(work.config(), work.context(), None, ["true"], host=2, seconds=5)
    with pytest.raises(click.BadParameter, match="neither a worker index nor `all`"):
        live._parse_host(Mock(), Mock(), "²")


def test_secrets_are_masked_in_the_lines_of_every_host(work: Workstation) -> None:
    shown, config = [], work.config("run.secrets=[TOKEN]")
    work.hosts.exits[0] = None
    detach(work, config, {"TOKEN": "s3cret-value"})
    work.hosts.execute = lambda command: (0, ["key s3cret-value"])
    context = work.context(TOKEN="s3cret-value")
    output = replace(context.output, emit=lambda worker, line: shown.append((worker, line.text)))
    execution.execute(config, replace(context, output=output), None, ["true"], host=None, seconds=5)
    assert shown == [(0, "key ***"), (1, "key ***")]
    execution.execute(config, replace(work.context(), output=output), None, ["true"], host=1, seconds=5)
    assert any("not masked" in message and "TOKEN" in message for message in work.messages)


# As Jupyter Server 2 prints it, when port 8888 is taken.
JUPYTER = """
echo "$*" >"$0.arguments"
echo "[I 10:00:00 ServerApp] The port 8888 is already in use, trying another port."
echo "[I 10:00:01 ServerApp] Jupyter Server 2.14.2 is running at:"
echo "[I 10:00:01 ServerApp] http://localhost:8889/lab?token=0123456789abcdef"
echo "[I 10:00:01 ServerApp]     http://127.0.0.1:8889/lab?token=0123456789abcdef"
"""


def start(work: Workstation, program: str | None, *overrides: str) -> execution.Jupyter:
    """Jupyter on host 1 of a live run, whose image has this program for it."""
    work.clock, work.hosts.exits[0] = Clock(), None
    detach(work, work.config(*overrides))
    programs = work.folder / "programs"
    if program is not None:
        write_program(programs, "jupyter-lab", program)

    def execute(command: Sequence[str]) -> tuple[int, list[str]]:
        environment = {"PATH": f"{programs}:/usr/bin:/bin"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20)
        return ended.returncode, ended.stdout.splitlines()

    work.hosts.execute = execute
    with execution.live_session(work.config(), work.context(), None) as session:
        return execution.start_jupyter(session, 1, 8888)


def test_the_port_and_the_token_are_those_that_jupyter_says(work: Workstation) -> None:
    jupyter = start(work, JUPYTER)
    assert (jupyter.port, jupyter.token) == (8889, "0123456789abcdef")
    arguments = (work.folder / "programs" / "jupyter-lab.arguments").read_text().split()
    assert arguments == ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=8888"], "no token among them"


@pytest.mark.parametrize(
    ("program", "overrides", "error", "words"),
    [
        (None, [], BadInput, r"no Jupyter.*exec --host 1 -- sh -c 'apt-get .* pip .* notebook'"),
        ("echo no place; exit 3", [], LaunchError, r"host 1 has ended: exit code 3; its last lines:\n  no place"),
        ("sleep 3", [], LaunchError, "host 1 has not said its address within 1 s"),
        (JUPYTER, ["run.transport=gcloud"], BadInput, "tpu-launch tunnel --port 8888"),  # lines come only at the end
        (JUPYTER, ["slice.iap=true"], BadInput, "tpu-launch tunnel --port 8888"),
    ],
)
def test_a_start_without_an_address_is_told(
    work: Workstation,
    monkeypatch: pytest.MonkeyPatch,
    program: str | None,
    overrides: list[str],
    error: Any,
    words: str,
) -> None:
    monkeypatch.setattr(execution, "_JUPYTER_START_SECONDS", 1.0 if program == "sleep 3" else 60.0)
    with pytest.raises(error, match=words):
        start(work, program, *overrides)


def test_a_server_whose_host_is_out_of_reach_has_no_last_lines() -> None:
    broken = execution._explain_end([CommandReport(1, None, 0.0, "no ssh")], 1, [])
    assert str(broken) == "Jupyter on host 1 has ended: no ssh; its last lines: none"
