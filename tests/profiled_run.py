"""What a profile of a trainer at work must be, in any framework."""

import threading
from pathlib import Path
from typing import Any

from tests.container import small_runs
from tests.xplane import Event, events
from training.profiler import Answer, folder_of, request


def require_a_profile(tmp_path: Path, **changes: Any) -> bytes:
    """Checks that a profile of five steps names them and their parts and changes no result. Returns the profile."""
    folder = small_runs.prepare(tmp_path)
    config = small_runs.document(folder, train__steps=60, evaluation__at_end=False, export__at_end=False, **changes)
    straight = small_runs.train_here(config, "straight")
    answers: list[Answer] = []

    def ask() -> None:
        while not answers:
            if (folder_of(0) / "trainer").exists():
                answers.append(request(folder_of(0), "five", 5, 60))

    asking = threading.Thread(target=ask)
    asking.start()
    profiled = small_runs.train_here(config, "profiled")
    asking.join(60)
    for key in ("first_loss", "last_loss", "final_weights_crc32c"):
        assert profiled[key] == straight[key], key
    # A run of TensorFlow knows no programs of earlier ones.
    new = straight["compilations"] if config.get("backend") == "tensorflow" else 0
    assert profiled["compilations"] == new, "the steps are the programs that they were before"

    (answer,) = answers
    assert answer.last - answer.first == 4
    assert answer.file == str(
        folder / "runs" / "profiled" / "profiles" / "five" / "plugins" / "profile" / "five" / "host-0.xplane.pb"
    )
    profile = Path(answer.file).read_bytes()
    found = events(profile)
    steps = [event for event in found if event.name == "train"]
    assert {event.stats["step_num"] for event in steps} >= set(range(answer.first, answer.last + 1))
    for step in steps:
        inside = [event.name for event in found if is_inside(event, step)]
        assert inside.count("data wait") == inside.count("dispatch") == inside.count("result") == 1
    return profile


def is_inside(event: Event, other: Event) -> bool:
    return event.line == other.line and other.begin <= event.begin and event.end <= other.end
