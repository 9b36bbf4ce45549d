"""A run's folder: it belongs to one launcher at a time, what is written there is read back, and no secret is in it."""

import errno
import json
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
from io import FileIO
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import load
from launcher.errors import BadInput, Exit, LaunchError
from launcher.provider import ContainerState, Overlay
from launcher.providers import this_machine
from launcher.run import events, post_mortem, specification
from launcher.run import ledger as ledger_module
from launcher.run.events import AttemptBegan, Ended, Entry, HostBack
from launcher.run.ledger import Ledger
from launcher.run.session import find_run, list_runs, new_run_id
from launcher.run.specification import SecretSource, Specification, read_env_file
from launcher.run.state import Phase, RunState, phase_on_hosts, recorded_ends, recorded_verdict, state_of
from launcher.run.verdict import Kind, Verdict
from tests.launcher.emulated_gcloud import Clock as StillClock
from tests.launcher.run_files import SLICE, load_text, new_run
from tests.launcher.test_runs import Workstation, start_and_lose_sight

HOLD = """
import sys
from pathlib import Path
from training.machine import Clock
from launcher.run.ledger import Ledger
with Ledger(Path(sys.argv[1]), Clock()).supervising():
    print("held", flush=True)
    sys.stdin.read()
"""
DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begin(home: Path) -> Ledger:
    return new_run(home, new_run_id("r", this_machine()), this_machine())


@pytest.fixture
def run(tmp_path: Path) -> Ledger:
    return begin(tmp_path)


def test_a_second_launcher_on_a_run_is_told_who_the_first_is_and_takes_over_when_it_is_gone(run: Ledger) -> None:
    command = [sys.executable, "-c", HOLD, str(run.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        taken = rf"supervised by another tpu-launch \(process {first.pid}\)"
        with pytest.raises(LaunchError, match=taken) as raised, run.supervising():
            pass
        assert raised.value.exit_code == Exit.CONFLICT
        first.kill()
    (run.folder / "lock").write_text("9" * 20)
    with run.supervising():
        assert (run.folder / "lock").read_text() == str(os.getpid())


def test_each_run_has_an_id_of_its_own_also_in_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({begin(tmp_path).folder.name for _ in range(20)}) == 20
    monkeypatch.setattr(f"{__name__}.new_run_id", lambda *_: "r-0101-000000-0000")
    begun = begin(tmp_path)
    with pytest.raises(FileExistsError):
        begin(tmp_path)
    assert begun.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("cut", [1, 10, -1])
def test_a_line_that_a_crash_cut_swallows_neither_the_next_event_nor_a_number(run: Ledger, cut: int) -> None:
    for number in range(2):
        run.append(AttemptBegan(number))
        run.append(Ended(number, outcome="failed"))
    path = run.folder / "events.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + last[:cut])
    run.append(AttemptBegan(2))
    assert run.state.attempt == 2
    assert [event.attempt for event in run.events()][-1] == 2
    run.append(Ended(2, outcome="finished"))
    assert run.state.outcome == "finished"
    path.write_text(lines[0])
    assert run.events() == [AttemptBegan(0)], "a file that became shorter is read anew"


def test_threads_that_read_the_events_at_once_count_none_twice(run: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Ledger._parse
    run.append(AttemptBegan(0))

    def parse_while_another_thread_reads(ledger: Ledger, data: bytes) -> list[Entry]:
        monkeypatch.setattr(Ledger, "_parse", parse)
        assert [event.attempt for event in ledger.events()] == [0]
        return parse(ledger, data)

    monkeypatch.setattr(Ledger, "_parse", parse_while_another_thread_reads)
    assert run.events() == run.events() == [AttemptBegan(0)]
    run.append(Ended(0, "saved"))
    assert run.events() == [AttemptBegan(0), Ended(0, "saved")]


def test_an_event_that_does_not_fit_on_the_disk_is_one_message(run: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run, "_events", Path("/dev/full"))
        patch.setattr(run, "clock", clock := StillClock())
        begun = clock.monotonic()
        with pytest.raises(LaunchError, match=r"can't be recorded for 60 s: No space left.*run --attach"):
            run.append(AttemptBegan(0))
        assert clock.monotonic() - begun >= 60, "it waits for room"
        said: list[str] = []
        for path in Path("/dev/full"), Path("/dev/full"), run.folder / "events.jsonl", Path("/dev/full"):
            patch.setattr(run, "_events", path)
            run.note(HostBack(0, 1), said.append)
        assert ["can't be recorded: No space left" in text for text in said] == [True, True], "once a kind and disk"
    run.append(AttemptBegan(0))
    assert run.state.attempt == 0


@pytest.mark.parametrize("room", [1, -1], ids=["the first byte", "all but the line's end"])
def test_an_event_written_in_part_is_recorded_once(run: Ledger, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    write = ledger_module.write_whole

    def fill(file: FileIO, data: bytes) -> None:
        monkeypatch.setattr(ledger_module, "write_whole", write)
        file.write(data[:room])
        raise DISK_FULL

    monkeypatch.setattr(ledger_module, "write_whole", fill)
    monkeypatch.setattr(run, "clock", StillClock())
    run.append(AttemptBegan(0))
    run.append(Ended(0, "saved"))
    assert run.events() == [AttemptBegan(0), Ended(0, "saved")]


def test_a_full_disk_does_not_hide_who_supervises_a_run(run: Ledger) -> None:
    assert not run.supervised()
    assert not (run.folder / "lock").exists(), "it asks without writing"
    with run.supervising():
        assert run.supervised()
        assert Ledger(run.folder, run.clock).supervised()
    assert not run.supervised()


EVENTS_OF_OTHERS = (
    {"event": "from the future", "attempt": 3},
    {"event": "started"},
    {"event": "started", "attempt": 1, "x": 1},
)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("events.jsonl", json.dumps({"time": "2026-01-01T00:00:00Z", **event}) + "\n") for event in EVENTS_OF_OTHERS),
        *(("run.json", text) for text in ("", "{", "[]", "{}", '{"run_id": "r"}')),
    ],
)
def test_a_run_that_is_damaged_or_of_another_version_hides_no_other_and_is_told_if_named(
    tmp_path: Path, run: Ledger, file: str, text: str
) -> None:
    bad = begin(tmp_path)
    (bad.folder / file).write_text(text)
    assert [ledger.run_id for ledger in list_runs(tmp_path, this_machine())] == [run.run_id]
    assert find_run(tmp_path, this_machine(), None).run_id == run.run_id
    message = r"run\.json is damaged" if file == "run.json" else r"events\.jsonl: an event of another version"
    with pytest.raises(BadInput, match=message):
        find_run(tmp_path, this_machine(), bad.run_id)


def test_a_stop_holds_although_a_full_disk_delayed_an_earlier_request_beyond_it(run: Ledger) -> None:
    """`run` was requested before `stop`, but a full disk delayed both records and the stop's was written first."""
    known = run.state.stops
    run.append(events.RunStopRequested(0))
    run.append(events.Requested(0, known))
    assert run.state.stop_requested
    run.append(events.Requested(0, run.state.stops))
    assert not run.state.stop_requested


BEGAN, STARTED, SAVED, FINISHED = AttemptBegan(0), events.Started(0), Ended(0, "saved"), Ended(0, "finished")
ORPHANED, OTHERS = (events.Orphaned(0, "container", hosts) for hosts in ((1,), (0, 2)))
AGAIN = events.Recovering(0, "saved", "preemption 1 of 1", 0.0)
ONE_ORPHAN = RunState(Phase.ENDED, BEGAN, "saved", orphans=(ORPHANED,))


@pytest.mark.parametrize(
    ("history", "state"),
    [
        ([], RunState()),
        ([BEGAN], RunState(Phase.STARTING, BEGAN)),
        ([BEGAN, STARTED], RunState(Phase.RUNNING, BEGAN)),
        ([BEGAN, SAVED], RunState(Phase.ENDED, BEGAN, "saved")),
        ([BEGAN, SAVED, STARTED], RunState(Phase.ENDED, BEGAN, "saved")),
        ([BEGAN, STARTED, FINISHED], RunState(Phase.FINISHED, BEGAN, "finished")),
        ([BEGAN, STARTED, SAVED, AttemptBegan(1)], RunState(Phase.STARTING, AttemptBegan(1))),
        ([BEGAN, STARTED, SAVED, AttemptBegan(1), STARTED], RunState(Phase.STARTING, AttemptBegan(1))),
        ([BEGAN, ORPHANED, SAVED], ONE_ORPHAN),
        ([BEGAN, ORPHANED, SAVED, events.Reaped(0, (1,))], RunState(Phase.ENDED, BEGAN, "saved")),
        ([BEGAN, ORPHANED, SAVED, OTHERS, events.Reaped(0, (0, 2))], ONE_ORPHAN),
        ([AGAIN, BEGAN, Ended(0, "not started")], RunState(Phase.ENDED, BEGAN, "not started", recovering=AGAIN)),
        ([AGAIN, BEGAN, Ended(0, "preempted")], RunState(Phase.ENDED, BEGAN, "preempted", recovering=AGAIN)),
        ([AGAIN, BEGAN, SAVED], RunState(Phase.ENDED, BEGAN, "saved")),
        ([BEGAN, STARTED, AGAIN, Ended(0, "preempted")], RunState(Phase.ENDED, BEGAN, "preempted")),
    ],
)
def test_the_events_of_a_run_say_where_it_stands(history: list[events.RunEvent], state: RunState) -> None:
    assert state_of(history) == state
    assert state.has_ended(0) is (state.attempt == 1 or not state.phase.is_open), "also before another attempt"


CREATED, RUNNING, EXITED, ABSENT = (ContainerState(status) for status in ("created", "running", "exited", "absent"))


@pytest.mark.parametrize(
    ("before", "containers", "lacks", "phase"),
    [
        (Phase.RUNNING, [EXITED, RUNNING], False, Phase.RUNNING),
        (Phase.RUNNING, [EXITED, EXITED], False, Phase.EXITED),
        (Phase.RUNNING, [EXITED, ABSENT], False, Phase.EXITED),
        (Phase.RUNNING, [ABSENT, ABSENT], False, Phase.VANISHED),
        (Phase.STARTING, [RUNNING, RUNNING], False, Phase.STARTING),
        (Phase.STARTING, [RUNNING, RUNNING], True, Phase.INTERRUPTED),
        (Phase.STARTING, [RUNNING, CREATED], False, Phase.INTERRUPTED),
        (Phase.STARTING, [ABSENT, ABSENT], False, Phase.INTERRUPTED),
        (Phase.STARTING, [EXITED, EXITED], False, Phase.EXITED),
    ],
)
def test_the_hosts_of_an_open_attempt_say_what_became_of_it(
    before: Phase, containers: list[ContainerState | None], lacks: bool, phase: Phase
) -> None:
    assert phase_on_hosts(before, containers, may_lack_secrets=lacks) is phase


def test_what_an_earlier_supervisor_saw_of_an_attempt_is_of_that_attempt_and_was_seen() -> None:
    gone, other, seen = (events.HostEnded(*each, False, "") for each in ((1, 0, None), (0, 0, 3), (1, 1, 3)))
    assert recorded_ends([gone, other, seen], 1) == {1: ContainerState("exited", 3)}, "a reboot leaves no exit code"
    judged = [
        events.Judged(attempt, kind, None, ()) for attempt, kind in ((0, "failed"), (1, "stalled"), (1, "failed"))
    ]
    assert recorded_verdict(judged, 1) == Verdict(Kind.FAILED), "the last one"
    assert recorded_verdict(judged[:1], 1) is None


FILE = f"""\
{SLICE}model: {{name: bert-base}}
data: {{train: gs://b/train, tokenizer: gs://b/tokenizer}}
train: {{steps: 10, global_batch_size: 64, learning_rate: 1e-4}}
output: gs://b/runs
run: {{secrets: [HF_TOKEN], environment: {{A: "1e-4", B: "no"}}}}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Specification:
    (tmp_path / "some.env").write_text("FROM_FILE=x\nHF_TOKEN=y\n")
    config = load_text(tmp_path, FILE, ["train.steps=20", "run.preemption_retries=3"])
    overlay = Overlay("/opt", b"archive")
    specification.write_overlay(tmp_path, overlay)
    variables = specification.read_env_file(tmp_path / "some.env")
    return specification.describe(
        config, "demo-1", env_file=tmp_path / "some.env", variables=variables, overlay=overlay, preflight=["ab"]
    )


def test_what_is_written_is_read_back_and_means_the_same_configuration(tmp_path: Path, spec: Specification) -> None:
    specification.write(tmp_path, spec)
    again = specification.read(tmp_path)
    assert again == spec
    config = again.config()
    original = load(tmp_path / "run.yaml", ["train.steps=20", "run.preemption_retries=3"])
    for section in ("slice", "image", "run", "gke", "trainer"):
        assert getattr(config, section) == getattr(original, section)
    assert config.document.dump() == original.document.dump(), "hosts get the same file, byte for byte"
    assert config.folder == original.folder
    assert stat.S_IMODE((tmp_path / "specification.yaml").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text", ["", "format: 2\n", "format: 1\nrun: x\n", "not: [valid", "- a list\n", "format: 1\nsurprise: 1\n"]
)
def test_a_damaged_or_newer_specification_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / specification.FILE).write_text(text)
    with pytest.raises(BadInput, match=r"specification\.yaml can't be used"):
        specification.read(tmp_path)


def test_an_overlay_that_was_changed_or_removed_is_refused(tmp_path: Path, spec: Specification) -> None:
    assert specification.read_overlay(tmp_path, spec) == Overlay("/opt", b"archive")
    (archive,) = tmp_path.glob("overlay-*")
    archive.write_bytes(b"other")
    with pytest.raises(BadInput, match="was changed"):
        specification.read_overlay(tmp_path, spec)
    archive.unlink()
    with pytest.raises(BadInput, match="can't be read"):
        specification.read_overlay(tmp_path, spec)


def test_secrets_come_from_command_line_env_file_and_environment(tmp_path: Path, spec: Specification) -> None:
    assert spec.secrets == ["HF_TOKEN", "FROM_FILE"]
    environment = {"HF_TOKEN": "environment", "FROM_FILE": "environment", "OTHER": "x"}
    assert SecretSource(environment, {}).values(spec) == {"HF_TOKEN": "y", "FROM_FILE": "x"}
    assert SecretSource(environment, {"HF_TOKEN": "given"}).values(spec)["HF_TOKEN"] == "given"
    (tmp_path / "some.env").unlink()
    assert SecretSource(environment, {}).values(spec) == {"HF_TOKEN": "environment", "FROM_FILE": "environment"}
    unseen = spec.model_copy(update={"env_file": "/" + "x" * 999})  # the system refuses, as in another user's folder
    assert SecretSource({"HF_TOKEN": "x"}, {}).values(unseen) == {"HF_TOKEN": "x"}


def test_a_resumed_run_keeps_the_secrets_that_its_command_line_does_not_repeat(spec: Specification) -> None:
    requested = spec.model_copy(update={"secrets": ["ADDED", "HF_TOKEN"]})
    assert specification.resume(spec, requested).secrets == ["ADDED", "HF_TOKEN", "FROM_FILE"]
    bare = spec.model_copy(update={"env_file": None, "overlay": None})
    for kept, now in (spec, bare), (bare, spec), (bare, bare):
        resumed = specification.resume(kept, now)
        assert (resumed.env_file, resumed.overlay) == (now.env_file or kept.env_file, now.overlay or kept.overlay)


@given(st.dictionaries(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), st.text("ab $#='\"\\{}", max_size=8)))
def test_quoted_values_of_an_env_file_arrive_as_they_are(values: dict[str, str]) -> None:
    quoted = {name: value.replace("\\", "\\\\").replace("'", "\\'") for name, value in values.items()}
    lines = "".join(f"{name}='{value}'\n" for name, value in quoted.items())
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(lines)
        file.flush()
        assert specification.read_env_file(Path(file.name)) == values


SECRET = 'a "quoted" s3cret'


def contents(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        return b"".join(tar.extractfile(member).read() for member in tar.getmembers())  # type: ignore[union-attr]


def test_no_form_of_a_secret_is_in_the_archive(run: Ledger) -> None:
    run.log_file(0, 0).write_text(f"2026 {SECRET}\n2026 {json.dumps({'key': SECRET})}\n")
    kept = contents(post_mortem.write(run, 0, {"host-0.txt": f"env {SECRET}"}, {"TOKEN": SECRET}))
    assert b"s3cret" not in kept
    assert kept.count(b"***") == 3


def test_a_secret_that_a_cut_divides_is_not_in_the_archive(run: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdefghij"
    bare = Ledger(run.folder / "bare", run.clock)
    bare.log_file(0, 0).write_text("x" * 5000 + secret + "y" * 1000)
    for size in range(900, 1000 + len(secret) + 1):  # before the cut, as many bytes are read as a masked form may have
        monkeypatch.setattr(post_mortem, "_LOG_BYTES", size)
        kept = contents(post_mortem.write(bare, 0, {}, {"TOKEN": secret}))
        assert kept.endswith(b"y" * 900)
        assert len(kept) <= size
        assert not any(digit in kept for digit in secret.encode()), size


def test_a_full_disk_costs_the_archive_and_nothing_else(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_mortem, "write", Mock(side_effect=DISK_FULL))
    work.hosts.exits[0] = 1
    assert work.run(work.config()).verdict.kind is Kind.FAILED
    assert work.hosts.state == {}  # the containers were removed after it
    assert any("no post-mortem of attempt 0 could be written" in message for message in work.messages)


def test_a_disk_that_fills_up_leaves_no_part_of_an_archive(run: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarfile.TarFile, "addfile", Mock(side_effect=DISK_FULL))
    with pytest.raises(OSError, match="No space left"):
        post_mortem.write(run, 0, {"slice.json": "{}"}, {})
    assert not [path for path in run.folder.iterdir() if "post-mortem" in path.name]


def test_secrets_whose_values_are_not_known_here_are_named(work: Workstation) -> None:
    start_and_lose_sight(work)
    work.hosts.end(1)
    work.attach(work.config(), HF_TOKEN="s3cret")
    assert any(message.endswith("; not masked in it: FROM_FILE") for message in work.messages)
    assert '"last_lines": ["a line"]' in (work.ledger.folder / "events.jsonl").read_text()


def test_an_env_file_is_read_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# comment\n\nA=1\nexport B='two words'\nC=\"$HOME\"\nD=a=b\nE=\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "C": "$HOME", "D": "a=b", "E": ""}
    path.write_bytes(b"\xef\xbb\xbfA=1\r\nB=2\r\n")  # as an editor on Windows writes it
    assert read_env_file(path) == {"A": "1", "B": "2"}
    path.write_text("A=secret\0value\n")
    with pytest.raises(BadInput, match="the value of A holds a NUL byte"):
        read_env_file(path)
    path.write_text("A=1\nnot a variable: secret-value\n")
    with pytest.raises(BadInput, match=r"\.env:2: must be NAME=VALUE") as refused:
        read_env_file(path)
    assert "secret-value" not in str(refused.value)
