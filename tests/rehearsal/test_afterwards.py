"""Claims about looking at a run in progress and after it failed: status, events, post-mortem. Two hosts; about 30 s."""

import json
import stat
import tarfile
from pathlib import Path

from tests.rehearsal.workstation import EmulatedSlice
from training.telemetry.progress_line import FILE_VARIABLE

SECRET = "an0ther-t0ken"


def test_status_tells_of_a_run_and_a_failure_leaves_a_masked_post_mortem(two_hosts: EmulatedSlice) -> None:
    progress = {"step": 12, "steps": 500, "loss": 6.54321, "examples_per_second": 1234.5, "data_wait": 0.25}
    line = json.dumps(progress)
    script = (
        f'[ "$TPU_WORKER_ID" = 0 ] && echo \'{line}\' > ${FILE_VARIABLE}; echo "token: $HF_TOKEN"; mkdir -p '
        f"/tmp/tpu_logs; echo from libtpu > /tmp/tpu_logs/driver.log; "
        "i=0; while [ ! -e /tmp/fail ]; do sleep 0.2; i=$((i+1)); [ $i -gt 40 ] && [ "
        '"$TPU_WORKER_ID" = 1 ] && exit 5; done'
    )
    running = two_hosts.begin_run(script, "--set", "run.secrets=[HF_TOKEN]", environment={"HF_TOKEN": SECRET})
    running.wait_for_both("token")
    shown = two_hosts.good_on_slice("status", "--json").json()
    assert progress.items() <= shown["progress"].items()
    assert shown["cost"] > 0
    assert all(0 <= host["quiet_seconds"] < 60 for host in shown["hosts"]), shown
    assert "step 12/500, loss 6.54321, 1,234.5 examples/s" in two_hosts.good_on_slice("status").output

    ended = running.end(60).require(10)
    told = ended.json()
    (line,) = [line for line in ended.output.splitlines() if "are kept in" in line]
    path = Path(line.split("are kept in ")[1])
    assert path.parent.name == told["run"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        kept = {name.split("/", 1)[1]: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    of_hosts = {"host-0.txt", "host-1.txt", "logs/attempt-0/host-0.log"}
    assert {"slice.json", "events.jsonl", "run.json", "config.yaml", *of_hosts} <= set(kept)
    assert '"ExitCode": 5' in kept["host-1.txt"]
    assert "from libtpu" in kept["host-1.txt"]
    assert '"state": "READY"' in kept["slice.json"]
    assert "token: ***" in kept["logs/attempt-0/host-1.log"]
    assert not [name for name, text in kept.items() if SECRET in text]

    events = [event["event"] for event in two_hosts.events(told["run"])]
    assert events.index("attempt") < events.index("started") < events.index("post-mortem")
    two_hosts.good_on_slice("events").require(0, "attempt 0: ended: failed: host 1: exit code 5")
    assert two_hosts.containers_of_runs() == []
