"""Claims about hosts that write too much, on an emulated slice: supervision goes on in little memory, and the failure
of another host is told at once. Each test writes about a gigabyte in a container."""

import time

import pytest

from tests.rehearsal.workstation import EmulatedSlice, on_this_machine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

MOST_MB = 150
WRITERS = {
    "one line of 1 GB": "for _ in range(1024):\n    out.write(b'x' * (1 << 20))\n",
    "100,000 lines a second": """
begun = time.monotonic()
for second in range(60):
    out.write(b''.join(b'line %d of second %d\\n' % (number, second) for number in range(100_000)))
    time.sleep(max(0, begun + second + 1 - time.monotonic()))
""",
}
PROGRAM = """
import os, sys, time
out = sys.stdout.buffer
if os.environ["TPU_WORKER_ID"] == "1":
    time.sleep(30)
    print("about to fail at", time.time(), flush=True)
    sys.exit(3)
WRITER
out.flush()
time.sleep(600)
"""


@pytest.mark.parametrize("kind", WRITERS)
def test_too_much_output_delays_no_verdict_and_fills_no_memory(two_hosts: EmulatedSlice, kind: str) -> None:
    program = ["--", "python3", "-c", PROGRAM.replace("WRITER", WRITERS[kind])]
    running = two_hosts.begin_on_slice("run", "--new", "--json", *program)
    running.ignored = "[0] "
    failed = float(running.wait_for(r"about to fail at", 300).split()[-1])
    running.wait_for("ending the attempt on all hosts: failed: host 1: exit code 3")
    seconds = time.time() - failed
    most = 0
    while running.process.poll() is None:  # it fetches last lines for a minute at most
        most = max(most, peak_memory(running.process.pid))
        time.sleep(0.1)
    ended = running.end()
    print(f"{kind}: the verdict came {seconds:.1f} s after the failure; the launcher had {most} MB at most")
    assert ended.code == 10, ended.output
    assert ("host 0: lines before its last 1000 may be missing: it wrote too many" in ended.output) == ("lines" in kind)
    assert seconds < on_this_machine(10)
    assert most < MOST_MB


def peak_memory(process: int) -> int:
    """Returns the most memory that a process has had, in MB; 0 once it has ended."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii") as lines:
            return max(int(line.split()[1]) // 1000 for line in lines if line.startswith("VmHWM:"))
    except (OSError, ValueError):
        return 0
