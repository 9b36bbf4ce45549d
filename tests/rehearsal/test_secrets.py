"""Claims about secrets: the command gets them, and nothing else shows them; about half a minute."""

import contextlib
import hashlib
import subprocess
import threading
from pathlib import Path

import pytest

from tests.rehearsal.workstation import Workstation, docker

VALUE = "v3ry-s3cret 'value' \"with\" $(quotes) and ü"
NEEDLE = b"v3ry-s3cret"


def arguments_of_all_processes(seen: set[bytes], over: threading.Event) -> None:
    """From the workstation's view: what runs on emulated hosts and in their containers is among it."""
    while not over.wait(0.03):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it may have ended
                seen.add(path.read_bytes())


@pytest.mark.parametrize("transport", ["auto", "gcloud"])
def test_a_secret_reaches_the_command_and_is_shown_nowhere(two_hosts: tuple[Workstation, str], transport: str) -> None:
    work, file = two_hosts
    program = (
        "import hashlib, os, time; print(hashlib.sha256(os.environ['HF_TOKEN'].encode()).hexdigest(), "
        "flush=True); print('reversed', os.environ['TPU_LAUNCH_SECRET'][::-1], flush=True); time.sleep(8)"
    )
    digest = hashlib.sha256(VALUE.encode()).hexdigest()
    plan = ("--emulated", "plan", "-f", file, "--set", "run.secrets=[HF_TOKEN]", "--", "true")
    planned = work.launch(*plan, environment={"HF_TOKEN": VALUE})
    assert planned.code == 0
    assert NEEDLE.decode() not in planned.output
    seen: set[bytes] = set()
    over = threading.Event()
    watch = threading.Thread(target=arguments_of_all_processes, args=(seen, over))
    watch.start()
    changes = ("--set", "run.secrets=[HF_TOKEN]", "--set", f"run.transport={transport}")
    command = ("--emulated", "run", "--new", "-f", file, *changes, "--", "python", "-c", program)
    running = work.begin(*command, environment={"HF_TOKEN": VALUE})
    running.wait_for(rf"^\[0\] {digest}")
    running.wait_for(rf"^\[1\] {digest}")
    running.wait_for(r"^\[0\] reversed [0-9a-f]{64}")
    running.wait_for(r"^\[1\] reversed [0-9a-f]{64}")
    made = {line.split()[-1][::-1] for line in running.lines if "reversed" in line}
    assert len(made) == 1, "both hosts know the same secret of the attempt"
    needles = [NEEDLE, made.pop().encode()]
    names = [entry.split()[0] for entry in work.containers_of_runs()]
    assert len(names) == 2
    assert not [needle for needle in needles if needle.decode() in docker("inspect", *names)]
    assert running.end(60).code == 0
    over.set()
    watch.join(10)
    assert any(b"--worker=" in line for line in seen), "the start was not seen"
    assert not [line for line in seen if any(needle in line for needle in needles)], (
        "no process may ever have it in its arguments, here or on a host"
    )
    assert not [needle for needle in needles if needle in "\n".join(running.lines).encode()]
    home = Path(work.environment["TPU_LAUNCH_HOME"])
    patterns = [f"-e{needle.decode()}" for needle in needles]
    grep = ["grep", "-r", "--files-with-matches", "--text", *patterns, str(home)]
    found = subprocess.run(grep, capture_output=True, text=True, check=False)
    assert found.stdout == "", "no file may hold it: runs, events, logs, gcloud's own logs"
