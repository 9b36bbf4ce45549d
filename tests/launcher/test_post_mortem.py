"""Claims about the archive of a failed attempt: no secret in it, also where a file is cut; and a full disk is told."""

import json
import tarfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.run import post_mortem
from launcher.run.ledger import Ledger
from launcher.run.verdict import Kind
from tests.launcher.test_runs import Workstation, start_and_lose_sight
from training.machine import Clock

SECRET = 'a "quoted" s3cret'
FULL = OSError(28, "No space left on device")


def contents(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        return b"".join(tar.extractfile(member).read() for member in tar.getmembers())  # type: ignore[union-attr]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path, Clock())


def test_no_form_of_a_secret_is_in_the_archive(ledger: Ledger) -> None:
    ledger.log_file(0, 0).write_text(f"2026 {SECRET}\n2026 {json.dumps({'key': SECRET})}\n")
    kept = contents(post_mortem.write(ledger, 0, {"host-0.txt": f"env {SECRET}"}, {"TOKEN": SECRET}))
    assert b"s3cret" not in kept
    assert kept.count(b"***") == 3


def test_a_secret_that_the_cut_of_a_long_log_divides_is_not_in_the_archive(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "0123456789abcdefghij"
    ledger.log_file(0, 0).write_text("x" * 5000 + secret + "y" * 1000)
    for size in range(900, 1000 + len(secret) + 1):  # before the cut, as many bytes are read as a masked form may have
        monkeypatch.setattr(post_mortem, "_LOG_BYTES", size)
        kept = contents(post_mortem.write(ledger, 0, {}, {"TOKEN": secret}))
        assert kept.endswith(b"y" * 900)
        assert len(kept) <= size
        assert not any(digit in kept for digit in secret.encode()), size


def test_a_full_disk_costs_the_archive_and_nothing_else(work: Workstation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_mortem, "write", Mock(side_effect=FULL))
    work.hosts.exits[0] = 1
    assert work.run(work.config()).verdict.kind is Kind.FAILED
    assert work.hosts.state == {}  # the containers were removed after it
    assert any("no post-mortem of attempt 0 could be written" in message for message in work.messages)


def test_a_disk_that_fills_up_leaves_no_part_of_an_archive(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_mortem, "_add", Mock(side_effect=FULL))
    with pytest.raises(OSError, match="No space left"):
        post_mortem.write(ledger, 0, {"slice.json": "{}"}, {})
    assert not [path for path in ledger.folder.iterdir() if "post-mortem" in path.name]


def test_secrets_whose_values_are_not_known_here_are_named(work: Workstation) -> None:
    start_and_lose_sight(work)
    work.hosts.end(1)
    work.attach(work.config(), HF_TOKEN="s3cret")
    assert any(message.endswith("; not masked in it: FROM_FILE") for message in work.messages)
    assert '"last_lines": ["a line"]' in (work.ledger.folder / "events.jsonl").read_text()
