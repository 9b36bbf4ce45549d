"""Claims about runs of any command on an emulated slice of two hosts (real gcloud, ssh, containers); about 90 s."""

import re
import time
from collections import Counter

from tests.processes import wait_until
from tests.rehearsal.workstation import EmulatedSlice, docker, on_this_machine, shell


def test_a_command_runs_on_every_host_which_knows_who_it_is_and_reaches_the_other(two_hosts: EmulatedSlice) -> None:
    script = (
        'echo "$TPU_WORKER_ID of $TPU_WORKER_HOSTNAMES $TPU_ACCELERATOR_TYPE $PJRT_DEVICE"; ls /etc/tpu-launch\n'
        'other=$(echo "$TPU_WORKER_HOSTNAMES" | cut -d, -f$((2 - TPU_WORKER_ID)))\n'
        'python3 -c "\nimport socket, sys, time\n'
        'server = socket.create_server((\\"\\", 8490))\nserver.settimeout(30)\n'
        "for _ in range(100):\n  try:\n    link = socket.create_connection((sys.argv[1], 8490), 1); "
        "break\n  except OSError: time.sleep(0.2)\n"
        'peer, _ = server.accept(); link.sendall(b\\"hello\\"); print(peer.recv(5).decode())\n" "$other"\n'
    )
    ended = two_hosts.good_on_slice("run", "--new", *shell(script))
    for worker in (0, 1):
        told = rf"^\[{worker}\] {worker} of [\d.]+,[\d.]+ v4-16 CPU$"
        assert re.search(told, ended.output, re.MULTILINE), ended.output
        assert f"[{worker}] config.yaml" in ended.output
        assert f"[{worker}] hello" in ended.output
    assert "finished" in ended.output
    assert two_hosts.containers_of_runs() == []


def test_the_first_host_that_fails_ends_the_run_and_is_named_with_its_last_lines(two_hosts: EmulatedSlice) -> None:
    """With 255, as ssh reports an error of its own: gcloud would run the command again."""
    script = 'if [ "$TPU_WORKER_ID" = 1 ]; then echo about to fail; exit 255; fi; echo waiting; exec sleep 600'
    running = two_hosts.begin_run(script)
    running.wait_for(r"^\[1\] about to fail")
    begun = time.monotonic()
    ended = running.end(120)
    assert time.monotonic() - begun < on_this_machine(10), "the other hosts must be stopped within 10 s"
    told = ended.require(10).json()
    assert (told["outcome"], told["cause"]["worker"], told["cause"]["exit_code"]) == ("failed", 1, 255)
    assert told["last_lines"] == ["about to fail"]
    assert ended.output.count("[1] about to fail") == 1
    assert two_hosts.containers_of_runs() == []


def test_a_command_that_the_image_lacks_is_told_in_words(two_hosts: EmulatedSlice) -> None:
    ended = two_hosts.on_slice("run", "--new", "--", "no-such-command")
    assert ended.code in (10, 24), ended.output
    ended.require(ended.code, "no-such-command")
    assert two_hosts.containers_of_runs() == []


def test_every_line_arrives_once_although_the_launcher_is_killed_twice(two_hosts: EmulatedSlice) -> None:
    script = (
        'i=0; while [ $i -lt 600 ]; do echo "line $i"; [ $((i % 3)) = 0 ] && echo "error $i" >&2; '
        "i=$((i+1)); sleep 0.02; done"
    )
    running = two_hosts.begin_run(script)
    run_id = running.run_id()
    for moment in ("line 60", "line 200"):
        running.wait_for(rf"^\[0\] {moment}$")
        running.process.kill()
        running.process.wait()
        running = two_hosts.begin_on_slice("run", "--attach")
    assert running.end(90).code == 0
    folder = two_hosts.runs / run_id / "logs" / "attempt-0"
    for worker in (0, 1):
        lines = [line.split(" ", 1)[1] for line in (folder / f"host-{worker}.log").read_text().splitlines()]
        assert Counter(lines) == Counter([f"line {i}" for i in range(600)] + [f"error {i}" for i in range(0, 600, 3)])
        assert [line for line in lines if line.startswith("line")] == [f"line {i}" for i in range(600)]


def test_ctrl_c_detaches_and_stop_stops_on_every_host(two_hosts: EmulatedSlice) -> None:
    running = two_hosts.begin_run("trap 'echo saving; exit 75' TERM; echo started; while :; do sleep 0.1; done")
    running.wait_for(r"^\[0\] started")
    running.interrupt()
    running.end(30).require(130, "run --attach")
    assert len([name for name in two_hosts.containers_of_runs() if " Up " in name]) == 2
    sizes = docker("inspect", "--size", "--format", "{{.SizeRw}}", *two_hosts.containers()).split()
    assert all(int(size) < 1_000_000 for size in sizes), f"bytes that the hosts' containers add to the image: {sizes}"

    shown = two_hosts.good_on_slice("status", "--json").json()
    assert shown["outcome"] is None
    assert [host["container"] for host in shown["hosts"]] == ["running", "running"]

    attached = two_hosts.begin_on_slice("run", "--attach")
    two_hosts.good_on_slice("stop")
    attached.end(60).require(75, "[0] saving", "[1] saving")
    assert two_hosts.containers_of_runs() == []


def test_a_command_runs_in_the_live_containers_and_ends_with_ctrl_c(two_hosts: EmulatedSlice) -> None:
    secret = {"TOKEN": "s3cret-value"}
    with_secret = ("--set", "run.secrets=[TOKEN]", "--set", "run.environment={COLOUR: blue}")
    script = "echo up; trap 'exit 75' TERM; while :; do sleep 0.1; done"
    running = two_hosts.begin_run(script, *with_secret, environment=secret)
    running.wait_for(r"^\[1\] up")

    shown = 'echo "$COLOUR $TPU_WORKER_ID" it\\\'s; cat; echo "key: s3cret-value"; printf end; exit $TPU_WORKER_ID'
    ended = two_hosts.on_slice("exec", *shell(shown), environment=secret)
    for worker in (0, 1):
        lines = [line for line in ended.output.splitlines() if line.startswith(f"[{worker}]")]
        assert lines == [f"[{worker}] blue {worker} it's", f"[{worker}] key: ***", f"[{worker}] end"]
    assert (ended.code, "host 1: exit code 1" in ended.output) == (1, True), ended.output

    late = two_hosts.on_slice("exec", "--host", "1", "--timeout", "1", *shell("echo begun; exec sleep 4321"))
    assert "[0]" not in late.require(24, "host 1: ", "not done within 1 s").output

    endless = two_hosts.begin_on_slice("exec", *shell("echo begun; setsid sleep 4321; sleep 4321"))
    endless.wait_for(r"^\[1\] begun")
    endless.interrupt()
    assert endless.end(20).code == 130
    names = two_hosts.containers()
    wait_until(lambda: not any("4321" in docker("top", name, "-o", "pid,args") for name in names), 10)
    assert not any(re.search("ended|failed", line) for line in running.lines), "the run goes on"
    two_hosts.good_on_slice("stop")
    assert running.end(60).code == 75
    two_hosts.on_slice("exec", "--", "true").require(2, "is not running")


def test_live_containers_are_stopped_and_a_changed_line_runs_without_a_build(two_hosts: EmulatedSlice) -> None:
    script = "cat line || echo of the image; trap 'exit 75' TERM; while :; do sleep 0.1; done"
    first = two_hosts.begin_run(script)
    first.wait_for(r"^\[1\] of the image")
    (two_hosts.folder / "code").mkdir()
    (two_hosts.folder / "code" / "line").write_text("changed\n")
    again = two_hosts.begin_on_slice("run", "--sync", "code", *shell(script))
    again.wait_for_both("changed")
    assert first.end(30).code == 75
    assert again.run_id() == first.run_id(), "the same run"
    assert [event["event"] for event in two_hosts.events(first.run_id())].count("attempt") == 2
    two_hosts.good_on_slice("stop")
    assert again.end(60).code == 75


def test_a_host_that_rebooted_unwatched_is_lost_whatever_its_engine_says(two_hosts: EmulatedSlice) -> None:
    """It was never seen away, and its engine says 255 of a container whose end it did not see."""
    running = two_hosts.begin_run("exec sleep 600")
    running.wait_for(r"run \S+: started on all hosts", 120)
    running.interrupt()
    assert running.end(30).code == 130
    two_hosts.good("emulator", "inject", "kill-host", "two", "1")
    two_hosts.good("emulator", "inject", "restore-host", "two", "1")
    told = two_hosts.on_slice("run", "--attach", "--json").require(11).json()
    cause = told["cause"]
    assert (cause["worker"], cause["exit_code"], told["run"]) == (1, 255, running.run_id()), cause
    assert "rebooted" in cause["what"]
