"""Claims about `tpu-launch notebook`, with a script in Jupyter's place: its address, what it says of missing parts."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.errors import BadInput, LaunchError
from launcher.provider import CommandReport
from launcher.run import execution
from tests.launcher.script_host import write_program
from tests.launcher.test_runs import Hosts, Workstation, detach
from training.machine import Clock

# As Jupyter Server 2 prints it, when port 8888 is taken.
JUPYTER = """
echo "$*" >"$0.arguments"
echo "[I 10:00:00 ServerApp] The port 8888 is already in use, trying another port."
echo "[I 10:00:01 ServerApp] Jupyter Server 2.14.2 is running at:"
echo "[I 10:00:01 ServerApp] http://localhost:8889/lab?token=0123456789abcdef"
echo "[I 10:00:01 ServerApp]     http://127.0.0.1:8889/lab?token=0123456789abcdef"
"""


def start(folder: Path, program: str | None, *overrides: str) -> execution.Jupyter:
    """Jupyter on host 1 of a live run, whose image has this program for it."""
    work = Workstation(folder, Hosts([None]), clock=Clock())  # type: ignore[arg-type]
    detach(work, work.config(*overrides))
    programs = folder / "programs"
    if program is not None:
        write_program(programs, "jupyter-lab", program)

    def execute(command: Sequence[str]) -> tuple[int, list[str]]:
        environment = {"PATH": f"{programs}:/usr/bin:/bin"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20)
        return ended.returncode, ended.stdout.splitlines()

    work.hosts.execute = execute
    with execution.live_session(work.config(), work.context(), None) as session:
        return execution.start_jupyter(session, 1, 8888)


def test_the_port_and_the_token_are_those_that_jupyter_says(tmp_path: Path) -> None:
    jupyter = start(tmp_path, JUPYTER)
    assert (jupyter.port, jupyter.token) == (8889, "0123456789abcdef")
    arguments = (tmp_path / "programs" / "jupyter-lab.arguments").read_text().split()
    assert arguments == ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=8888"], "no token among them"


def test_an_image_without_jupyter_is_told_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no Jupyter.*exec --host 1 -- python -m pip install notebook"):
        start(tmp_path, None)


def test_a_server_that_ends_at_once_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"host 1 has ended: exit code 3; its last lines:\n  no place"):
        start(tmp_path, "echo no place; exit 3")
    broken = execution._explain_end([CommandReport(1, None, 0.0, "no ssh")], 1, [])
    assert str(broken) == "Jupyter on host 1 has ended: no ssh; its last lines: none"


def test_an_address_is_waited_for_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_JUPYTER_START_SECONDS", 1.0)
    with pytest.raises(LaunchError, match="host 1 has not said its address within 1 s"):
        start(tmp_path, "sleep 3")


@pytest.mark.parametrize("through_gcloud", ["run.transport=gcloud", "slice.iap=true"])
def test_where_lines_come_only_at_the_end_it_is_refused(tmp_path: Path, through_gcloud: str) -> None:
    with pytest.raises(BadInput, match="tpu-launch tunnel --port 8888"):
        start(tmp_path, JUPYTER, through_gcloud)
