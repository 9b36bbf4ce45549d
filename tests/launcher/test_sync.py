"""Claims about overlays and `run --sync`: only changes travel; the running attempt is stopped first, unless refused."""

import io
import os
import tarfile
import threading
from pathlib import Path

import pytest

from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.images import build_context, overlays
from launcher.images.build import Image
from launcher.provider import Overlay
from launcher.run import events
from launcher.run.verdict import Kind
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.test_runs import Workstation, detach
from tests.processes import wait_until
from training.machine import Clock

IMAGE = "r/i@sha256:ab"


def contents(overlay: Overlay | None) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(overlay.archive)) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "part").mkdir(parents=True)
    (folder / "train.py").write_text("one\n")
    (folder / "part" / "model.py").write_text("model\n")
    return folder


def record(home: Path, code: Path, folder: str = "/home/trainer") -> None:
    overlays.record_code(home, Image(IMAGE, build_context.hash_files(build_context.folder(code)), folder))


@pytest.fixture
def own_code(tmp_path: Path, code: Path) -> Config:
    return load_text(tmp_path, SLICE + "image: {code: code}\nrun: {command: [train]}\n")


def test_only_files_that_changed_since_the_image_was_made_travel(tmp_path: Path, code: Path, own_code: Config) -> None:
    record(tmp_path, code)
    (code / "train.py").write_text("two\n")
    (code / "new.py").write_text("new\n")
    (code / "secret.env").write_text("KEY=value\n")
    (code / "part" / "model.py").unlink()
    changes = overlays.find_changes(str(code), own_code, tmp_path, IMAGE)
    assert contents(changes.overlay) == {"train.py": "two\n", "new.py": "new\n"}
    assert (changes.changed, changes.removed) == (("new.py", "train.py"), ("part/model.py",))
    assert changes.overlay.target == "/home/trainer"
    record(tmp_path, code)
    (code / "train.py").chmod(0o755)
    assert overlays.find_changes(str(code), own_code, tmp_path, IMAGE).changed == ("train.py",), "it is a program now"


def test_all_files_travel_over_an_unknown_image_or_another_folder(tmp_path: Path, code: Path, own_code: Config) -> None:
    record(tmp_path, code)
    both = ("part/model.py", "train.py")
    assert overlays.find_changes(str(code), own_code, tmp_path, "r/i@sha256:other").changed == both
    assert overlays.find_changes(f"{code}=/opt/app", own_code, tmp_path, IMAGE).changed == both
    (path,) = (tmp_path / "images").iterdir()
    path.write_text('{"train.py": ')
    assert overlays.find_changes(str(code), own_code, tmp_path, IMAGE).changed == both


def test_a_file_that_can_not_be_read_and_one_that_is_too_large_are_named(code: Path) -> None:
    with pytest.raises(BadInput, match=r"--overlay: .*part can't be read: Is a directory"):
        overlays._pack_files("--overlay", "/target", code, [code / "part"])
    os.truncate(code / "train.py", 33 << 20)
    with pytest.raises(
        BadInput, match="--overlay: 33 MiB are more than the 32 of an overlay; build an image with them"
    ):
        overlays._pack_files("--overlay", "/target", code, [code / "train.py"])


def test_after_a_reverted_change_all_files_are_sent_again(tmp_path: Path, code: Path, own_code: Config) -> None:
    record(tmp_path, code)
    changes = overlays.find_changes(str(code), own_code, tmp_path, IMAGE)
    assert changes.changed == ()
    assert contents(changes.overlay) == {"train.py": "one\n", "part/model.py": "model\n"}


@pytest.mark.parametrize(
    ("option", "words"),
    [("absent", "not a folder"), ("=/app", "not a folder"), ("code=app", "absolute path"), ("code=", "absolute path")],
)
def test_a_folder_that_can_not_be_synced_is_refused(
    tmp_path: Path, own_code: Config, monkeypatch: pytest.MonkeyPatch, option: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir(exist_ok=True)
    with pytest.raises(BadInput, match=words):
        overlays.find_changes(option, own_code, tmp_path, IMAGE)


def test_in_a_users_own_image_the_target_must_be_named(work: Workstation, code: Path) -> None:
    with pytest.raises(BadInput, match=r"--sync .*=TARGET, an absolute path"):
        work.run(work.config(), sync=str(code))


def test_the_attempt_of_another_terminal_is_stopped_and_the_next_has_the_files(work: Workstation, code: Path) -> None:
    """Both commands wait for each other, so time is real."""
    work.hosts.exits[0], work.clock = None, Clock()  # type: ignore[assignment]
    (code / "token.json").write_text("{}")
    other = threading.Thread(target=lambda: work.run(work.config()), daemon=True)
    other.start()
    wait_until(lambda: any('"started"' in path.read_text() for path in work.home.glob("runs/*/events.jsonl")))
    outcome = work.run(work.config(), sync=f"{code}=/app")
    other.join(20)
    assert not other.is_alive()
    assert (outcome.attempt, outcome.verdict.kind) == (1, Kind.FINISHED)
    first, second = work.hosts.attempts
    assert (first.run_id, first.image) == (second.run_id, second.image)
    assert contents(second.overlay) == {"train.py": "one\n", "part/model.py": "model\n"}
    assert sum("as credentials: token.json;" in line or "removed here" in line for line in work.messages) == 1
    assert [event.outcome for event in work.ledger.events() if isinstance(event, events.Ended)] == ["saved", "finished"]


def test_no_files_are_sent_while_hosts_or_the_process_of_the_attempt_go_on(work: Workstation, code: Path) -> None:
    work.hosts.exits[0] = None
    detach(work, work.config())
    with work.ledger.supervising(), pytest.raises(LaunchError, match="has not ended within 60 s"):
        work.run(work.config(), sync=f"{code}=/app")
    assert not any("starts it has not ended" in line for line in work.messages), "`stop` does not wait for that one"
    work.hosts.silent = {1}
    with pytest.raises(LaunchError, match="1 of 2 hosts could not stop"):
        work.run(work.config(), sync=f"{code}=/app")


@pytest.mark.parametrize(
    ("wrong", "words"), [({"sync": "nowhere=/app"}, "is not a folder"), ({"overlay": "CODE=/app"}, "one of the two")]
)
def test_a_refused_request_stops_nothing(work: Workstation, code: Path, wrong: dict[str, str], words: str) -> None:
    work.hosts.exits[0] = None
    detach(work, work.config())
    options = {"sync": f"{code}=/app", **{key: value.replace("CODE", str(code)) for key, value in wrong.items()}}
    with pytest.raises(BadInput, match=words):
        work.run(work.config(), **options)
    assert "stop" not in work.hosts.calls
    assert not work.ledger.state.stop_requested


def test_the_same_files_are_the_same_overlay_and_others_another(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name / "training"
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "loop.py").write_text("x = 1\n")
        (folder / "__pycache__" / "loop.pyc").write_text(name)
    one, two = (overlays.pack(f"{tmp_path / name / 'training'}=/opt/tpu-launch/training") for name in ("a", "b"))
    assert one.digest == two.digest
    (tmp_path / "b" / "training" / "loop.py").write_text("x = 2\n")
    assert overlays.pack(f"{tmp_path / 'b' / 'training'}=/opt/tpu-launch/training").digest != one.digest


def test_an_overlay_holds_no_secrets_of_the_folder(tmp_path: Path) -> None:
    for name in ("train.py", ".env", "sub/id_rsa", ".git/config", "account"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"private_key": "0123456789abcdef"}' if name == "account" else name)
    (tmp_path / "same.py").symlink_to("train.py")
    (tmp_path / "settings").symlink_to(".env")
    assert [*contents(overlays.pack(f"{tmp_path}=/app"))] == ["same.py", "train.py"]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("x", "FOLDER=T"), ("=/opt", "FOLDER=T"), (".=relative", "FOLDER=T"), ("/no/such=/opt", "not a folder")],
)
def test_a_wrong_overlay_is_refused(wanted: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        overlays.pack(wanted)
