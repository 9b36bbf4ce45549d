"""Claims about `launcher.shell`, with real processes."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from launcher import shell
from launcher.errors import CommandMissing, CommandTimeout, Exit
from launcher.home import is_held
from tests.launcher.run_files import SLICE
from tests.launcher.script_host import write_program
from tests.processes import ROOT, is_alive, wait_until


def test_a_missing_program_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandMissing, match="install the Google Cloud CLI"):
        shell.run(["gcloud", "version"], timeout=1)
    with pytest.raises(CommandMissing, match="no-such-program was not found on PATH") as caught:
        shell.run(["no-such-program"], timeout=1)
    assert caught.value.exit_code is Exit.BAD_INPUT


def test_a_time_out_names_the_command_and_ends_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "child"
    with pytest.raises(CommandTimeout, match="no answer within 1 s from: sh -c"):
        shell.run(["sh", "-c", f"sleep 60 & echo $! > {note}; wait"], timeout=1)
    wait_until(lambda: not is_alive(int(note.read_text())), 5)
    monkeypatch.setattr(shell, "_TERMINATE_SECONDS", 0.3)
    begun = time.monotonic()
    with pytest.raises(CommandTimeout):
        shell.run(["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], timeout=0.5)
    with pytest.raises(CommandTimeout, match="not done within 1 s"):
        shell.stream(["sh", "-c", f"setsid sh -c 'echo $$ >{note}; exec sleep 60' & wait"], print, timeout=1)
    os.kill(int(note.read_text()), signal.SIGKILL)  # it lives, in a session of its own, and holds the output
    assert time.monotonic() - begun < 50, "one that ignores the polite signal is killed"


def test_a_spawned_process_outlives_its_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    spawn = f"shell.spawn(['sh', '-c', 'sleep 1; echo done'], log=Path({str(log)!r}))"
    code = f"from pathlib import Path; from launcher import shell; print({spawn}.pid)"
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert is_alive(pid)
    wait_until(lambda: log.read_text() == "done\n", tell=log.read_text)
    assert log.stat().st_mode & 0o077 == 0


def test_a_gcloud_that_outlives_its_launcher_keeps_its_mark(tmp_path: Path) -> None:
    mark, pid_file = tmp_path / "slices" / "p.s.asking", tmp_path / "pid"
    assert not is_held(mark)
    code = f"""
from pathlib import Path
from launcher.gcloud import run_gcloud
from launcher.home import hold_shared
with hold_shared(Path({str(mark)!r})) as descriptor:
    run_gcloud(["sh", "-c", "echo $$ >{pid_file}; exec sleep 60"], timeout=60, pass_fds=(descriptor,))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    parent.kill()
    parent.wait()
    assert is_held(mark)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    wait_until(lambda: not is_held(mark))


def test_commands_are_logged_without_their_input_and_environment(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "launcher")
    shell.run(["sh", "-c", "cat >/dev/null; exit 3"], timeout=10, input="a secret", env={"TOKEN": "another"})
    first, last = caplog.messages
    assert first == "$ sh -c 'cat >/dev/null; exit 3'"
    assert last.startswith("sh ended with 3 after ")
    assert "secret" not in caplog.text
    assert "another" not in caplog.text


def test_a_secret_of_the_environment_is_given_byte_by_byte() -> None:
    assert shell.run(["od", "-An", "-tx1"], timeout=10, input=os.fsdecode(b"a\xff")).stdout.split() == ["61", "ff"]


def test_an_attached_command_stays_in_this_process_group_to_which_a_terminal_sends_ctrl_c() -> None:
    code = "import os, sys; sys.exit(7 if os.getpgrp() == int(sys.argv[1]) else 1)"
    assert shell.attached([sys.executable, "-c", code, str(os.getpgrp())]) == 7


def test_a_locale_without_utf_8_ends_no_command() -> None:
    code = "from launcher.cli import main, terminal; main.cli = lambda **_: terminal.show('50 % \u2588'); main.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, capture_output=True)
    assert shown.stdout == b"50 % \\u2588\n"


def take_terminal() -> None:
    """Makes standard input this session's terminal, in a child. The tests themselves may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("under", ["a terminal that is closed", "nohup"])
def test_a_closed_terminal_ends_a_tunnel_with_its_gcloud_but_not_under_nohup(tmp_path: Path, under: str) -> None:
    """gcloud runs in a session of its own, which a terminal's SIGHUP does not reach."""
    gcloud_script = f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; trap 'sleep 1; exit' TERM; sleep 60"
    write_program(tmp_path / "bin", "gcloud", gcloud_script)
    (tmp_path / "run.yaml").write_text(SLICE.replace("v4-16", "v4-8") + "run: {command: ['true']}\n")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "launcher.cli", "tunnel", "-f", str(tmp_path / "run.yaml"), "--port=8888"]
    command = ["nohup", *words] if under == "nohup" else words
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    own: Any = {"start_new_session": True, "preexec_fn": take_terminal, "env": environment, "cwd": tmp_path}
    tunnel = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **own)
    os.close(theirs)
    try:
        wait_until((tmp_path / "pid").exists, 30)
        gcloud = int((tmp_path / "pid").read_text())
        os.close(ours)  # SIGHUP, which shells repeat
        if under == "nohup":
            with pytest.raises(subprocess.TimeoutExpired):
                tunnel.wait(2)
            tunnel.terminate()
        else:
            wait_until(lambda: tunnel.poll() is not None or tunnel.send_signal(signal.SIGHUP), 30)
        assert tunnel.wait(30) == Exit.OK
        assert not is_alive(gcloud)
    finally:
        tunnel.kill()
        tunnel.wait()
