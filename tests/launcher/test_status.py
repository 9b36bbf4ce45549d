"""Claims about what `status` tells of a run that was recovered: a few lines, and nothing that only a reader of the code
understands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.run.ledger import Ledger
from launcher.run.status import recent_history
from training.machine.clock import SystemClock

LOST = {"worker": 1, "what": "the host went away and came back; its container was killed with it"}
EVENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attempt", {"attempt": 0, "image": "sha256:1f"}),
    ("started", {"attempt": 0}),
    ("host out of reach", {"attempt": 0, "host": 1, "problem": "timed out"}),
    ("host back", {"attempt": 0, "host": 1}),
    ("ended", {"attempt": 0, "outcome": "host lost", "cause": LOST}),
    ("post-mortem", {"attempt": 0, "path": "post-mortem-0.tar.gz"}),
    ("recover", {"attempt": 0, "after": "host lost", "reason": "preemption 1 of 10", "delay": 0.0}),
    ("attempt", {"attempt": 1, "image": "sha256:1f"}),
    ("started", {"attempt": 1}),
    ("recovered", {"attempt": 1, "seconds": {"delay": 0.0, "slice": 2.9, "start": 8.3}}),
)


def test_the_story_of_a_recovery_is_a_few_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"time": "2026-11-21T22:00:00Z", "event": name, **details}) for name, details in EVENTS]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert [line.partition(" ")[2] for line in recent_history(Ledger(tmp_path, SystemClock()))] == [
        "attempt 0: started",
        "attempt 0: host 1 out of reach: timed out",
        "attempt 0: host 1 back",
        f"attempt 0: ended: host lost: host 1: {LOST['what']}",
        "attempt 0: recover: preemption 1 of 10",
        "attempt 1: started",
        "attempt 1: recovered: in 11.2 s: delay 0.0 s, slice 2.9 s, start 8.3 s",
    ]
