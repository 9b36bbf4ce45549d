"""Claims about the scripts of hosts, in real shells; tests/rehearsal shows what they do to an engine."""

import base64
import gzip
import json
import os
import re
import secrets
import shlex
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import container_output
from launcher.provider import Attempt, ContainerState, Overlay
from launcher.providers import this_machine
from launcher.tpu_vm import host_scripts
from launcher.tpu_vm.connections import ConnectionPool
from launcher.tpu_vm.host_scripts import HUGE_PAGES, parse_observation, parse_reports
from launcher.workstation import Address
from tests.launcher.script_host import SHELLS, ScriptHost
from tests.launcher.test_execution import Connected

TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=30)
DIGEST = f"@sha256:{'0' * 64}"


def attempt(**changes: object) -> Attempt:
    return replace(Attempt("demo-1", 0, "sha256:ab", ("true",), {}), **changes)


HOSTS = [f"10.0.0.{worker}" for worker in range(4)]


def start(**changes: object) -> str:
    return host_scripts.start_script(attempt(**changes), HOSTS, "v4-32")


def reported(host: ScriptHost, script: str, shell: str = "sh", stdin: str = "") -> str:
    """Returns the report of a script without worker 3 and the host's time."""
    return re.sub(r"^tpu-launch 3 |(?<=sha256:\w{2}) \d{10,}| ?\n$", "", host.run(script, shell, stdin))


@pytest.mark.parametrize(
    "script",
    [
        start(files={"config.yaml": b"x"}),
        start(image=f"eu-docker.pkg.dev/p/r/i{DIGEST}"),
        host_scripts.render("check_engine"),
        host_scripts.observe_script("demo", "2026-01-01T00:00:00Z"),
        host_scripts.observe_script("demo", "2026-01-01T00:00:00Z", patience=2.0, tail=10, progress=True),
        host_scripts.stop_script("demo", 5, remove=True),
        host_scripts.render("evidence", container="demo"),
        host_scripts.stacks_script("demo"),
        host_scripts.execute_script("demo", ["echo", "it's"], "mark", seconds=5, held=True),
        host_scripts.end_execution_script("demo", "mark"),
        host_scripts.render("run_once", mark="mark", command="true"),
        host_scripts.secrets_script(attempt()),
        host_scripts.overlay_script(attempt(overlay=Overlay("/opt/it's here", b"x"))),
        host_scripts.render("await_secrets", seconds=5),
        host_scripts.load_script("receive_secrets"),
        container_output.DUMP_STACKS,
        container_output.READ_PROGRESS,
        host_scripts.load_script("list_tpu_holders"),
    ],
)
def test_scripts_are_valid_posix_shell_and_never_end_with_255(script: str) -> None:
    for shell in ("sh", *SHELLS):
        assert subprocess.run([shell, "-n"], input=script, text=True, check=False).returncode == 0
    assert "255" not in script
    assert "\n. ./" not in script.replace("\n. ./secrets\n", "\n"), "everything is included"


@settings(max_examples=40)
@given(
    st.lists(TEXT, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["A", "B_1"]), TEXT.filter(lambda text: "\n" not in text)),
    st.sampled_from(SHELLS),
)
def test_any_command_and_value_reaches_the_engine(command: list[str], values: dict[str, str], shell: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        host = ScriptHost(Path(folder) / "host")
        host.run(start(command=tuple(command), environment=values), shell)
        words = host.created
    assert words[-len(command) :] == command
    assert "TPU_WORKER_ID=3" in words
    for key, value in values.items():
        assert f"{key}={value}" in words


@settings(max_examples=40)
@given(TEXT, st.booleans(), st.sampled_from(SHELLS))
def test_parameters_are_never_code(value: str, flag: bool, shell: str) -> None:
    script = host_scripts.render("engine", value, parameter=value, flag=flag)
    script += 'printf "%s\\0" "$1" "$parameter" "$flag"'
    shown = subprocess.run([shell, "-c", script], stdout=subprocess.PIPE, check=True).stdout
    assert shown.decode().split("\0")[:-1] == [value, value, "yes" if flag else "no"]


@pytest.mark.parametrize("may", [True, False])
@pytest.mark.parametrize(("kind", "wanted"), [("v4-8", False), ("v5litepod-8", True), ("v5p-8", True), ("v6e-8", True)])
def test_huge_pages_are_on_where_they_help(host: ScriptHost, shell: str, kind: str, *, wanted: bool, may: bool) -> None:
    path = host.folder / "pages"
    path.write_text("always [madvise] never\n")
    if not may:
        host.replace("sudo", "echo no >&2; exit 1")
    host.answer_container({"Status": "running"})
    script = host_scripts.start_script(attempt(), HOSTS, kind).replace(HUGE_PAGES, str(path))
    assert reported(host, script, shell) == "started sha256:ab" + " always [madvise] never" * (wanted and not may)
    assert (path.read_text() == "always\n") == (wanted and may)


@pytest.mark.parametrize(
    ("setting", "report"),
    [
        ("ps=echo demo-1 tpu-launch-demo-1-0 exited 0; echo other tpu-launch-other-0 running 0", "busy other"),
        ("ps=echo demo-1 tpu-launch-demo-1-1 running 1", "failed attempt 1 of this run is on the host already"),
        ("ps=echo no such socket >&2; exit 1", "failed its container engine does not answer: no such socket"),
        ("hostname=echo 10.0.0.2", "moved to 10.0.0.2"),
        ("hostname=echo 10.0.0.33", "moved to 10.0.0.33"),
        ("sudo=echo 7:python3 8:my_job", "failed its TPU is held by 7:python3 8:my_job"),
        ("curl=exit 7", "failed the metadata server does not tell the worker index"),
    ],
)
def test_a_host_that_can_not_take_the_run_tells_why(host: ScriptHost, shell: str, setting: str, report: str) -> None:
    """A preparation may also come after that of a later attempt: this one ended while the host was unreachable."""
    program, _, lines = setting.partition("=")
    (host.answer if program == "ps" else host.replace)(program, lines)
    assert report in host.run(start(), shell)
    assert not {"create", "rm", "start"} & set(host.verbs)


def test_earlier_attempts_go_and_an_ended_container_of_another_run_stays(host: ScriptHost, shell: str) -> None:
    earlier = "echo demo-1 tpu-launch-demo-1-8 exited 8; echo demo-1 tpu-launch-demo-1-9 running 9"
    host.answer("ps", f"{earlier}; echo other tpu-launch-other-0 exited 0")
    host.answer_container({"Status": "running"})
    assert reported(host, start(number=10), shell) == "started sha256:ab"
    removed = [call for call in host.calls if call.startswith("rm --force")]
    assert removed == ["rm --force tpu-launch-demo-1-8 tpu-launch-demo-1-9"]
    assert not any(call.startswith("pull") for call in host.calls), "an image that is named by its id is there"


@pytest.mark.parametrize(("image", "shown"), [("us-docker.pkg.dev/p/r/i", True), ("registry.example.com/i", False)])
def test_hosts_show_their_token_to_google_only(host: ScriptHost, image: str, shell: str, *, shown: bool) -> None:
    host.answer("--config", 'case "$*" in *" login "*) cat >"$HOST/token" ;; esac')
    host.run(start(image=image + DIGEST), shell)
    login = "login --username oauth2accesstoken --password-stdin https://us-docker.pkg.dev"
    assert any(call.endswith(login) for call in host.calls) == shown
    assert (host.folder / "token").exists() == shown
    assert not any("t0ken" in call for call in host.calls), "on standard input, not among the arguments"
    assert any(f"pull --quiet {image}{DIGEST}" in call for call in host.calls)


@pytest.mark.parametrize(
    ("call", "report"),
    [("pull", r"image can not be pulled \(\S+ free on its disk\)"), ("start", "container can not be started")],
)
def test_what_an_engine_refuses_is_reported_in_its_words(host: ScriptHost, shell: str, call: str, report: str) -> None:
    host.answer(call, "echo no such >&2; echo thing >&2; exit 1")
    assert re.fullmatch(f"failed the {report}: no such thing", reported(host, start(image="a.com/i" + DIGEST), shell))
    host.answer("create", "echo pull access denied: docker login >&2; exit 1")
    assert "can not be created: its engine has no image sha256:ab: set image.rep" in reported(host, start(), shell)


@pytest.mark.parametrize("sent", [b"an archive", b"half an archive"])
def test_an_overlay_is_copied_only_as_it_was_sent(host: ScriptHost, shell: str, sent: bytes) -> None:
    host.answer("cp -", "cat >/dev/null")
    script = host_scripts.overlay_script(attempt(overlay=Overlay("/opt/it's", gzip.compress(b"an archive"))))
    report = reported(host, script, shell, stdin=base64.b64encode(gzip.compress(sent)).decode())
    assert (report == "copied") == (sent == b"an archive") == (host.calls == ["cp - tpu-launch-demo-1-0:/opt/it's"])
    assert report == "copied" or re.match(r"failed another overlay \(\w{64}\) arrived", report)


def test_a_second_stop_sends_no_second_signal(host: ScriptHost, shell: str) -> None:
    container = f"tpu-launch-test-{secrets.token_hex(8)}"
    host.answer_container({"Status": "exited"})
    stop = host_scripts.stop_script(container, 5, remove=False)
    for _ in range(2):
        assert host.run(stop, shell) == "tpu-launch 3 stopped\n"
    assert [call.split()[0] for call in host.calls if not call.startswith("inspect")] == ["stop", "wait"]
    assert host.run(host_scripts.stop_script(container, 5, remove=True), shell) == "tpu-launch 3 stopped\n"
    over = Path(f"/var/tmp/{container}.3.over")
    assert [*Path("/tmp").glob(f"{container}*"), *Path("/var/tmp").glob(f"{container}*")] == [over]
    over.unlink()


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_start_that_comes_after_its_attempts_end_does_nothing(host: ScriptHost, shell: str, meanwhile: bool) -> None:
    """The delayed ssh command of a killed launcher must not remove the next attempt's container."""
    run = f"test-{secrets.token_hex(8)}"
    over = Path(f"/var/tmp/tpu-launch-{run}-0.3.over")
    host.answer("ps", f"echo {run} tpu-launch-{run}-1 running 1 boot" if not meanwhile else "true")
    if meanwhile:
        host.answer("create", f": >{over}")
    else:
        host.answer_container({"Status": "exited"})
        assert "stopped" in host.run(host_scripts.stop_script(f"tpu-launch-{run}-0", 5, remove=True), shell)
        assert over.exists()
        (host.folder / "calls").unlink(missing_ok=True)
    try:
        report = host.run(start(run_id=run), shell)
    finally:
        over.unlink()
    assert report == "tpu-launch 3 failed this attempt was ended before it started on the host\n"
    assert [call for call in host.calls if call.startswith("rm --force")] == (
        [f"rm --force tpu-launch-{run}-0"] if meanwhile else []
    )


def options(**changes: object) -> str:
    return shlex.join(host_scripts.create_arguments(attempt(**changes), ["10.0.0.1"], "v4-8"))


def test_a_container_is_created_with_these_options() -> None:
    """The volume is the engine's own, which outlives the container. A host that shuts down lets the command save."""
    given = {"environment": {"PJRT_DEVICE": "CPU", "A": "b c"}, "stop_seconds": 25, "compile_cache_gb": 2.5}
    assert options(number=2, command=("train", "--lr 1"), **given) == (
        "--name tpu-launch-demo-1-2 --label tpu-launch.run=demo-1 --label tpu-launch.attempt=2 --entrypoint '' "
        "--privileged --network host --init --log-driver json-file --log-opt max-size=1g --log-opt max-file=4 "
        "--shm-size 16g --ulimit memlock=-1:-1 --volume tpu-launch-compiled-programs:/var/cache/tpu-launch "
        "--stop-timeout 25 --user 0 --env PJRT_DEVICE=CPU --env TPU_LAUNCH_RUN_ID=demo-1 --env TPU_LAUNCH_ATTEMPT=2 "
        "--env TPU_ACCELERATOR_TYPE=v4-8 --env TPU_WORKER_HOSTNAMES=10.0.0.1 --env "
        "TPU_LAUNCH_PROGRESS_FILE=/dev/shm/tpu-launch-progress --env TPU_LAUNCH_COMPILE_CACHE=/var/cache/tpu-launch "
        "--env TPU_LAUNCH_COMPILE_CACHE_GB=2.5 --env 'A=b c' sha256:ab train '--lr 1'"
    )


@pytest.mark.parametrize(
    ("changes", "words", "is_there"),
    [
        ({"user": "1000:1000"}, "--user 1000:1000", True),
        ({"compile_cache_gb": 0.0}, "--volume", False),
        ({"compile_cache_gb": 0.0}, "COMPILE_CACHE", False),
        ({}, "--tmpfs", False),  # a single host needs no shared secret
        ({"overlay": Overlay("/app", b"x")}, "--tmpfs /run/tpu-launch:mode=1777,size=1m sha256:ab", True),
        ({"secrets": {"KEY": "s3cret"}, "start_seconds": 899.1}, "seconds=1020\n", True),  # of the slowest host
    ],
)
def test_the_options_of_a_container_follow_the_attempt(changes: dict[str, object], words: str, is_there: bool) -> None:
    assert (words in options(**changes)) == is_there


def test_secrets_that_do_not_arrive_end_the_command_with_a_message(tmp_path: Path, shell: str) -> None:
    script = host_scripts.render("await_secrets", seconds=1).replace("/run/tpu-launch", str(tmp_path))
    ended = subprocess.run([shell, "-c", script, "sh", "true"], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert "did not arrive within 1 s" in ended.stderr


@pytest.mark.parametrize("other", ["demo-1", "demo-2"])
def test_of_two_starts_at_once_one_creates_and_the_other_finds_it(host: ScriptHost, shell: str, other: str) -> None:
    """A replay finds its container, another run is refused. The engine lists what was started; a start takes long."""
    host.answer_container({"Status": "running"})
    host.answer("start", 'sleep 0.5; echo "$2" >>"$HOST/running"')
    name = 'r=${c#tpu-launch-}; echo "${r%-0} $c running 0"'
    host.answer("ps", f'[ ! -e "$HOST/running" ] || while read -r c; do {name}; done <"$HOST/running"')
    starts = [host.popen(start(run_id=run), shell) for run in ("demo-1", other)]
    reports = [parse_reports(process.communicate(timeout=30)[0], "started", [3])[0] for process in starts]
    (container,) = (host.folder / "running").read_text().split()
    busy = [report.occupied_by for report in reports if not report.ok]
    assert busy == ([] if other == "demo-1" else [container.removeprefix("tpu-launch-").removesuffix("-0")])
    assert host.verbs.count("create") == 1


@pytest.mark.parametrize(
    ("state", "verbs"),
    [
        ("running", ["image", "ps", "ps", "inspect"]),
        ("exited", ["image", "ps", "ps", "inspect"]),
        ("created", ["image", "ps", "pull", "ps", "rm", "create", "start", "inspect"]),  # before its files were there
    ],
)
def test_a_container_is_started_once(host: ScriptHost, shell: str, state: str, verbs: list[str]) -> None:
    host.answer("ps", f"echo demo-1 tpu-launch-demo-1-0 {state} 0")
    host.answer_container({"Status": "running" if state == "created" else state})
    host.replace("sudo", "true" if state == "created" else "echo 7:python3")  # its own process holds the TPU
    assert reported(host, start(image=f"repo{DIGEST}"), shell) == "started sha256:ab"
    assert host.verbs == verbs


def test_a_host_pulls_once_after_it_knows_that_the_run_may_start(host: ScriptHost, shell: str) -> None:
    """On a host of many containers, each call of the engine's client is a process that takes tens of milliseconds."""
    script = start(image=f"repo{DIGEST}", files={"config.yaml": b"x"})
    host.answer_container({"Status": "running"})
    host.answer("pull", "touch $HOST/pulled")
    host.answer("image inspect", '[ -e "$HOST/pulled" ] || exit 1')
    for before in (["image", "ps", "pull"], ["image"]):
        known = len(host.verbs)
        assert reported(host, script, shell) == "started sha256:ab"
        assert host.verbs[known:] == [*before, "ps", "create", "cp", "start", "inspect"]


@pytest.mark.parametrize(
    ("script", "report"),
    [
        (start(), "started sha256:ab"),
        (host_scripts.stop_script("demo", 5, remove=True), "stopped"),
        (host_scripts.secrets_script(attempt()), "delivered"),
    ],
)
def test_a_connected_host_need_not_ask_its_number(host: ScriptHost, shell: str, script: str, report: str) -> None:
    host.answer_container({"Status": "exited"})
    host.replace("curl", "echo the metadata server is asked >&2; printf 9")
    machine = replace(this_machine(), connect=lambda _: Connected(host, shell))
    pool = ConnectionPool([Address(3, "h", "me", "key", "known", "h")], machine)
    assert pool.run(3, script, timeout=20).stdout.startswith(f"tpu-launch 3 {report}")


@pytest.mark.parametrize(("state", "call"), [("exited", "stop --time 5 demo"), ("created", "rm --force demo")])
def test_a_stop_needs_no_disk_and_nothing_created_starts(host: ScriptHost, shell: str, state: str, call: str) -> None:
    host.answer_container({"Status": state})
    host.replace("mkdir", "exit 1")
    host.run(host_scripts.stop_script("demo", 5, remove=False), shell)
    assert call in host.calls


def test_an_engine_that_is_down_has_stopped_nothing_and_is_no_absence(host: ScriptHost, shell: str) -> None:
    observe = host_scripts.observe_script("demo", None)
    assert host.run(observe, shell) == "absent\n"
    host.answer("version", "echo no such >&2; echo socket >&2; exit 1")
    report = host.run(host_scripts.stop_script("demo", 5, remove=True), shell)
    assert report == "tpu-launch 3 failed its container engine does not answer: no such socket \n"
    look, _ = parse_observation(3, host.run(observe, shell))
    assert (look.container, look.problem) == (None, "its container engine does not answer: no such socket")


def test_an_observation_asks_for_the_lines_that_are_wanted(host: ScriptHost, shell: str) -> None:
    host.answer_container({"Status": "running"}, "an earlier boot")
    host.answer("logs", "echo 2026-01-01T00:00:00.5Z hello")
    script = host_scripts.observe_script("demo", "2026-01-01T00:00:00Z", patience=2.0, tail=10)
    summary, line = host.run(script, shell).splitlines()
    assert json.loads(summary)["state"] == {"Status": "running"}
    assert line == "2026-01-01T00:00:00.5Z hello"
    assert host.calls[0] == "wait demo"
    assert host.calls[-1] == "logs --timestamps --tail 10 --since 2026-01-01T00:00:00Z demo"


@pytest.mark.parametrize("second", [9, 10, 11])  # in the second that was asked for, more lines than needed do no harm
def test_a_clock_step_costs_no_line(host: ScriptHost, shell: str, monkeypatch: pytest.MonkeyPatch, second: int) -> None:
    options = "--tail 10" if second <= 10 else "--tail 10 --since 2026-01-01T00:00:10.5Z"
    monkeypatch.setattr(host_scripts, "LOG_BYTES", 4)
    host.answer_container({"Status": "running"}, "a boot")
    host.answer("logs", "echo old; echo new")
    host.replace("date", f'case "$*" in *%Y*) echo 2026-01-01T00:00:{second:02d} ;; *) exec /bin/date "$@" ;; esac')
    shown = host.run(host_scripts.observe_script("demo", "2026-01-01T00:00:10.5Z", tail=10), shell)
    assert shown.endswith("new\n" if second <= 10 else "old\n")
    assert host.calls[-1] == f"logs --timestamps {options} demo"
    host.run(host_scripts.observe_script("demo", "2026-01-01T00:00:10.5Z"), shell)
    assert host.calls[-1] == "logs --timestamps --since 2026-01-01T00:00:10.5Z demo"


def observed(host: ScriptHost, shell: str) -> ContainerState:
    return parse_observation(3, host.run(host_scripts.observe_script("demo", None), shell))[0].container


@pytest.mark.parametrize("rebooted", [False, True])
def test_an_end_says_whether_the_host_rebooted_under_it(host: ScriptHost, shell: str, *, rebooted: bool) -> None:
    host.run(start(), shell)
    (label,) = (word for word in host.created if word.startswith("tpu-launch.boot="))
    created_on = "another-boot.7" if rebooted else label.removeprefix("tpu-launch.boot=")
    state = {"Status": "exited", "ExitCode": 255}
    for finished in ("2999-01-01T00:00:00Z", "0001-01-01T00:00:00Z"):  # the second: its engine does not know when
        host.answer_container({**state, "FinishedAt": finished}, created_on)
        container = observed(host, shell)
        assert (container.exit_code, container.rebooted, container.ended_before_reboot) == (255, rebooted, False)
    host.answer_container({**state, "FinishedAt": "2001-01-01T00:00:00Z"}, created_on)
    assert observed(host, shell).ended_before_reboot == rebooted


@pytest.mark.parametrize(
    ("refused", "is_there", "report"),
    [
        (True, True, "forbidden sudo: a password is required"),
        (True, False, "failed its container engine does not answer yet: sudo: a password is required"),
        (False, True, "failed its container engine does not answer yet: Cannot connect"),
    ],
)
def test_a_user_who_may_not_use_an_engine_is_told_from_an_engine_that_is_not_up_yet(
    host: ScriptHost, shell: str, report: str, *, refused: bool, is_there: bool
) -> None:
    host.answer("version", "echo Cannot connect >&2; exit 1")
    if refused:
        host.replace("sudo", "echo sudo: a password is required >&2; exit 1")
    socket = host.folder if is_there else host.folder / "missing"
    script = host_scripts.render("check_engine").replace("[ -w /var/run/docker.sock ]", "false")
    assert reported(host, script.replace("/var/run/docker.sock", str(socket)), shell) == report


def test_secrets_reach_the_command_and_stay_nowhere(tmp_path: Path, shell: str) -> None:
    """The two scripts that run in the container, in a folder that stands for its tmpfs."""
    value = "it's\na 'secret' $HOME"
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    wait, receive = (
        host_scripts.render(name, seconds=20).replace("/run/tpu-launch", str(folder))
        for name in ("await_secrets", "receive_secrets")
    )
    command = subprocess.Popen([shell, "-c", wait, "sh", "sh", "-c", 'printf %s "$KEY"'], stdout=subprocess.PIPE)
    for _ in range(2):  # a replay finds them taken, or writes the same again
        subprocess.run([shell, "-c", receive], input=host_scripts.secrets_input({"KEY": value}).encode(), check=True)
    assert command.communicate(timeout=20)[0].decode() == value
    assert not (folder / "secrets").exists()


def test_secrets_that_were_cut_off_are_not_taken(tmp_path: Path, shell: str) -> None:
    """A connection that breaks half-way ends standard input like any other end."""
    receive = host_scripts.load_script("receive_secrets").replace("/run/tpu-launch", str(tmp_path))
    text = host_scripts.secrets_input({"KEY": "value", "OTHER": "two\nlines"}).encode()
    for end in range(len(text) - 1):
        ended = subprocess.run([shell, "-c", receive], input=text[:end], check=False) if end % 7 == 0 else None
        assert ended is None or ended.returncode != 0
        assert not (tmp_path / "ready").exists()
    subprocess.run([shell, "-c", receive], input=text, check=True)
    assert (tmp_path / "ready").exists()
    assert (tmp_path / "secrets").read_bytes() == text


def test_the_hosts_of_an_attempt_are_given_a_secret_that_no_script_and_no_other_attempt_holds() -> None:
    one, other = attempt(), attempt()
    hosts = ["10.0.0.1", "10.0.0.2"]
    secret = one.all_secrets(2)["TPU_LAUNCH_SECRET"]
    assert len(secret) == 64
    assert secret != other.all_secrets(2)["TPU_LAUNCH_SECRET"]
    arguments = host_scripts.create_arguments(one, hosts, "v4-16")
    assert "/run/tpu-launch:mode=1777,size=1m" in arguments, "the container waits for it"
    shown = [*arguments, host_scripts.secrets_script(one), host_scripts.start_script(one, hosts, "v4-16"), repr(one)]
    assert not any(secret in text for text in shown)
    assert secret in host_scripts.secrets_input(one.all_secrets(2))


def test_only_processes_that_hold_a_device_for_writing_count(tmp_path: Path) -> None:
    script = host_scripts.load_script("list_tpu_holders").replace("/dev/", f"{tmp_path}/")
    (tmp_path / "vfio").mkdir()
    for name, mode in (("accel0", os.O_RDONLY), ("vfio/1", os.O_RDONLY | os.O_CLOEXEC)):
        held = os.open(tmp_path / name, mode | os.O_CREAT)
        assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == ""
        writing = os.open(tmp_path / name, os.O_RDWR)
        output = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
        assert [word.partition(":")[0] for word in output.split()] == [str(os.getpid())]
        os.close(held)
        os.close(writing)
