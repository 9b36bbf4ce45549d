"""Claims about secrets: the command gets them, and nothing else shows them; about half a minute."""

import contextlib
import hashlib
import subprocess
import threading
from pathlib import Path

import pytest

from tests.rehearsal.workstation import EmulatedSlice, docker, settings

VALUE = "v3ry-s3cret 'value' \"with\" $(quotes) and ü"
NEEDLE = b"v3ry-s3cret"


def arguments_of_all_processes(seen: set[bytes], over: threading.Event) -> None:
    """From the workstation's view: what runs on emulated hosts and in their containers is among it."""
    while not over.wait(0.03):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it may have ended
                seen.add(path.read_bytes())


@pytest.mark.parametrize("transport", ["auto", "gcloud"])
def test_a_secret_reaches_the_command_and_is_shown_nowhere(two_hosts: EmulatedSlice, transport: str) -> None:
    program = (
        "import hashlib, os, time; print(hashlib.sha256(os.environ['HF_TOKEN'].encode()).hexdigest(), "
        "flush=True); print('reversed', os.environ['TPU_LAUNCH_SECRET'][::-1], flush=True); time.sleep(8)"
    )
    digest = hashlib.sha256(VALUE.encode()).hexdigest()
    plan = ("plan", "--set", "run.secrets=[HF_TOKEN]", "--", "true")
    assert NEEDLE.decode() not in two_hosts.on_slice(*plan, environment={"HF_TOKEN": VALUE}).require(0).output
    seen: set[bytes] = set()
    over = threading.Event()
    watch = threading.Thread(target=arguments_of_all_processes, args=(seen, over))
    watch.start()
    changes = settings("run.secrets=[HF_TOKEN]", f"run.transport={transport}")
    command = ("run", "--new", *changes, "--", "python", "-c", program)
    running = two_hosts.begin_on_slice(*command, environment={"HF_TOKEN": VALUE})
    running.wait_for_both(digest)
    running.wait_for_both("reversed [0-9a-f]{64}")
    made = {line.split()[-1][::-1] for line in running.lines if "reversed" in line}
    assert len(made) == 1, "both hosts know the same secret of the attempt"
    needles = [NEEDLE, made.pop().encode()]
    names = two_hosts.containers()
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
    patterns = [f"-e{needle.decode()}" for needle in needles]
    grep = ["grep", "-r", "--files-with-matches", "--text", *patterns, str(two_hosts.home)]
    found = subprocess.run(grep, capture_output=True, text=True, check=False)
    assert found.stdout == "", "no file may hold it: runs, events, logs, gcloud's own logs"
