"""Claims about runs of any command on an emulated slice of two hosts (real gcloud, ssh, containers); about 90 s."""

import re
import time
from collections import Counter

from tests.processes import wait_until
from tests.rehearsal.workstation import Workstation, docker, on_this_machine

TwoHosts = tuple[Workstation, str]


def command(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


def run_id_of(output: str) -> str:
    match = re.search(r"run (\S+): attempt \d+ on", output)
    assert match, output
    return match.group(1)


def test_a_command_runs_on_every_host_which_knows_who_it_is_and_reaches_the_other(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    script = (
        'echo "$TPU_WORKER_ID of $TPU_WORKER_HOSTNAMES $TPU_ACCELERATOR_TYPE $PJRT_DEVICE"; ls /etc/tpu-launch\n'
        'other=$(echo "$TPU_WORKER_HOSTNAMES" | cut -d, -f$((2 - TPU_WORKER_ID)))\n'
        'python3 -c "\nimport socket, sys, time\n'
        'server = socket.create_server((\\"\\", 8490))\nserver.settimeout(30)\n'
        "for _ in range(100):\n  try:\n    link = socket.create_connection((sys.argv[1], 8490), 1); "
        "break\n  except OSError: time.sleep(0.2)\n"
        'peer, _ = server.accept(); link.sendall(b\\"hello\\"); print(peer.recv(5).decode())\n" "$other"\n'
    )
    ended = work.good("--emulated", "run", "--new", "-f", file, *command(script))
    for worker in (0, 1):
        told = rf"^\[{worker}\] {worker} of [\d.]+,[\d.]+ v4-16 CPU$"
        assert re.search(told, ended.output, re.MULTILINE), ended.output
        assert f"[{worker}] config.yaml" in ended.output
        assert f"[{worker}] hello" in ended.output
    assert "finished" in ended.output
    assert work.containers_of_runs() == []


def test_the_first_host_that_fails_ends_the_run_and_is_named_with_its_last_lines(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    script = 'if [ "$TPU_WORKER_ID" = 1 ]; then echo about to fail; exit 3; fi; echo waiting; exec sleep 600'
    running = work.begin("--emulated", "run", "--new", "--json", "-f", file, *command(script))
    running.wait_for(r"^\[1\] about to fail")
    begun = time.monotonic()
    ended = running.end(120)
    assert time.monotonic() - begun < on_this_machine(10), "the other hosts must be stopped within 10 s"
    assert ended.code == 10, ended.output
    told = ended.json()
    assert told["outcome"] == "failed"
    assert (told["cause"]["worker"], told["cause"]["exit_code"]) == (1, 3)
    assert told["last_lines"] == ["about to fail"]
    assert work.containers_of_runs() == []


def test_a_command_that_the_image_lacks_is_told_in_words(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    ended = work.launch("--emulated", "run", "--new", "-f", file, "--", "no-such-command")
    assert ended.code in (10, 24), ended.output
    assert "no-such-command" in ended.output
    assert "Traceback" not in ended.output
    assert work.containers_of_runs() == []


def test_exit_code_255_is_reported_once_and_not_run_again(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    script = 'echo ran; [ "$TPU_WORKER_ID" = 0 ] && exit 255; exec sleep 60'
    ended = work.launch("--emulated", "run", "--new", "--json", "-f", file, *command(script))
    assert ended.code == 10, ended.output
    assert ended.json()["cause"]["exit_code"] == 255
    assert ended.output.count("[0] ran") == 1


def test_every_line_arrives_once_although_the_launcher_is_killed_twice(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    script = (
        'i=0; while [ $i -lt 600 ]; do echo "line $i"; [ $((i % 3)) = 0 ] && echo "error $i" >&2; '
        "i=$((i+1)); sleep 0.02; done"
    )
    running = work.begin("--emulated", "run", "--new", "-f", file, *command(script))
    first = running.wait_for(r"run \S+: attempt 0 on")
    for moment in ("line 60", "line 200"):
        running.wait_for(rf"^\[0\] {moment}$")
        running.process.kill()
        running.process.wait()
        running = work.begin("--emulated", "run", "--attach", "-f", file)
    assert running.end(90).code == 0
    folder = work.runs / run_id_of(first) / "logs" / "attempt-0"
    for worker in (0, 1):
        lines = [line.split(" ", 1)[1] for line in (folder / f"host-{worker}.log").read_text().splitlines()]
        wanted = Counter([f"line {i}" for i in range(600)] + [f"error {i}" for i in range(0, 600, 3)])
        assert Counter(lines) == wanted
        assert [line for line in lines if line.startswith("line")] == [f"line {i}" for i in range(600)]


def test_ctrl_c_detaches_and_stop_stops_on_every_host(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    script = "trap 'echo saving; exit 75' TERM; echo started; while :; do sleep 0.1; done"
    running = work.begin("--emulated", "run", "--new", "-f", file, *command(script))
    running.wait_for(r"^\[0\] started")
    running.interrupt()
    ended = running.end(30)
    assert ended.code == 130
    assert "run --attach" in ended.output
    assert len([name for name in work.containers_of_runs() if " Up " in name]) == 2

    shown = work.good("--emulated", "status", "-f", file, "--json").json()
    assert shown["outcome"] is None
    assert [host["container"] for host in shown["hosts"]] == ["running", "running"]

    attached = work.begin("--emulated", "run", "--attach", "-f", file)
    work.good("--emulated", "stop", "-f", file)
    ended = attached.end(60)
    assert ended.code == 75, ended.output
    assert "[0] saving" in ended.output
    assert "[1] saving" in ended.output
    assert work.containers_of_runs() == []


def test_a_command_runs_in_the_live_containers_and_ends_with_ctrl_c(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    secret = {"TOKEN": "s3cret-value"}
    with_secret = ("--set", "run.secrets=[TOKEN]", "--set", "run.environment={COLOUR: blue}")
    script = command("echo up; trap 'exit 75' TERM; while :; do sleep 0.1; done")
    running = work.begin("--emulated", "run", "--new", "-f", file, *with_secret, *script, environment=secret)
    running.wait_for(r"^\[1\] up")
    execute = ("--emulated", "exec", "-f", file)

    shown = 'echo "$COLOUR $TPU_WORKER_ID" it\\\'s; cat; echo "key: s3cret-value"; printf end; exit $TPU_WORKER_ID'
    ended = work.launch(*execute, *command(shown), environment=secret)
    for worker in (0, 1):
        lines = [line for line in ended.output.splitlines() if line.startswith(f"[{worker}]")]
        assert lines == [f"[{worker}] blue {worker} it's", f"[{worker}] key: ***", f"[{worker}] end"]
    assert (ended.code, "host 1: exit code 1" in ended.output) == (1, True), ended.output

    late = work.launch(*execute, "--host", "1", "--timeout", "1", "--", "sh", "-c", "echo begun; exec sleep 4321")
    assert (late.code, "host 1: " in late.output, "not done within 1 s" in late.output) == (24, True, True), late.output
    assert "[0]" not in late.output

    endless = work.begin(*execute, *command("echo begun; setsid sleep 4321; sleep 4321"))
    endless.wait_for(r"^\[1\] begun")
    endless.interrupt()
    assert endless.end(20).code == 130
    names = [entry.split()[0] for entry in work.containers_of_runs()]
    wait_until(lambda: not any("4321" in docker("top", name, "-o", "pid,args") for name in names), 10)
    assert not any(re.search("ended|failed", line) for line in running.lines), "the run goes on"
    work.good("--emulated", "stop", "-f", file)
    assert running.end(60).code == 75
    refused = work.launch(*execute, "--", "true")
    assert (refused.code, "is not running" in refused.output) == (2, True), refused.output


def test_live_containers_are_stopped_and_a_changed_line_runs_without_a_build(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    script = command("cat line || echo of the image; trap 'exit 75' TERM; while :; do sleep 0.1; done")
    first = work.begin("--emulated", "run", "--new", "-f", file, *script)
    first.wait_for(r"^\[1\] of the image")
    (work.folder / "code").mkdir()
    (work.folder / "code" / "line").write_text("changed\n")
    again = work.begin("--emulated", "run", "-f", file, "--sync", "code", *script)
    for worker in (0, 1):
        again.wait_for(rf"^\[{worker}\] changed")
    assert first.end(30).code == 75
    begun = run_id_of("\n".join(again.lines))
    kinds = [event["event"] for event in work.events(begun)]
    assert begun == run_id_of("\n".join(first.lines)), "the same run"
    assert kinds.count("attempt") == 2
    work.good("--emulated", "stop", "-f", file)
    assert again.end(60).code == 75


def test_no_image_is_copied(two_hosts: TwoHosts) -> None:
    work, file = two_hosts
    running = work.begin("--emulated", "run", "--new", "-f", file, *command("echo up; exec sleep 60"))
    running.wait_for(r"^\[1\] up")
    names = [entry.split()[0] for entry in work.containers_of_runs()]
    sizes = docker("inspect", "--size", "--format", "{{.SizeRw}}", *names).split()
    assert all(int(size) < 1_000_000 for size in sizes), f"bytes that the hosts' containers add to the image: {sizes}"
    work.good("--emulated", "stop", "-f", file, "--grace", "1")
    assert running.end(60).code == 14


def test_a_host_that_rebooted_while_no_launcher_watched_is_lost_whatever_its_engine_says(two_hosts: TwoHosts) -> None:
    """It was never seen away, and its engine says 255 of a container whose end it did not see."""
    work, file = two_hosts
    running = work.begin("--emulated", "run", "--new", "-f", file, "--", "sleep", "600")
    run_id = running.wait_for(r"run \S+: started on all hosts", 120).split("run ")[1].split(":")[0]
    running.interrupt()
    assert running.end(30).code == 130
    work.good("emulator", "inject", "kill-host", "two", "1")
    work.good("emulator", "inject", "restore-host", "two", "1")
    ended = work.launch("--emulated", "run", "--attach", "--json", "-f", file)
    assert ended.code == 11, ended.output
    cause = ended.json()["cause"]
    assert (cause["worker"], cause["exit_code"]) == (1, 255), cause
    assert "rebooted" in cause["what"]
    assert ended.json()["run"] == run_id
