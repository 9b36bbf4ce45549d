"""Whatever is killed, whenever: restoring gives the newest whole checkpoint, every record counts once, and the last bit
of the weights is the same.

Each run is killed at named points of a save and at random moments, started again after each kill, and compared with an
undisturbed one. TPU_LAUNCH_KILLS says how many kills and failures there are in all: a sixth on four hosts, a third on
two, half with a bucket that fails too. They come at night, because the simulated trainers of tests/simulation are
killed at every point in `make test`. A failure prints the faults, which are drawn from a fixed seed.
"""

import io
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from launcher.emulator.http_server import Body, Disconnected, HttpResponse, json_response
from tests.bucket_server import BucketServer
from tests.container import small_runs
from tests.container.faulty_trainers import POINTS, POINTS_OF_FIRST, Fault, Run, resumed_at
from training.errors import Exit
from training.telemetry import metrics

pytestmark = pytest.mark.nightly

KILLS = int(os.environ.get("TPU_LAUNCH_KILLS", "100"))
IN_BUCKET = KILLS - KILLS // 2
ON_DISK = [(2, KILLS // 3, 0), (4, KILLS // 6, 7)]  # hosts, kills, seed
EPOCH = 8  # steps: 64 records in batches of 8
# An attempt takes 3 s, most of it compiling, or some minutes on a machine that has other things to do. What hangs,
# hangs forever.
ATTEMPT = 300.0
SECONDS = 600 + 60 * KILLS


def config(folder: Path, kills: int, **changes: Any) -> dict[str, Any]:
    """One layer, a save every second step, and steps enough for every kill to come before the last."""
    steps = -(-(4 * kills + 8) // EPOCH) * EPOCH
    common = {"train__steps": steps, "checkpoint__every_steps": 2, "checkpoint__keep_last": 2, "export__at_end": False}
    small = {"model__layers": 1, "model__hidden_size": 16, "data__evaluation": None}
    return small_runs.document(folder, **common, **small, **changes)


def draw_kills(kills: int, hosts: int, seed: int) -> Iterator[dict[int, Fault]]:
    """The points of a save in turn, from point number `seed` on, each on some host; every third fault happens at
    a random moment, some on all hosts."""
    draw = random.Random(seed)
    points = [*POINTS, *POINTS_OF_FIRST]
    for number in range(kills):
        if number % 3 == 2:
            # Of a step, a save or a commit, whatever happens to be going on then.
            fault = Fault("a step", draw.randint(1, 4), draw.uniform(0.001, 0.08))
            victims = list(range(hosts)) if draw.random() < 0.3 else [draw.randrange(hosts)]
        else:
            point = points[(seed + number - number // 3) % len(points)]
            # Deletions begin with the third save.
            fault = Fault(point, 1 if point == "between deletions" else draw.randint(1, 2))
            victims = [0] if point in POINTS_OF_FIRST else [draw.randrange(hosts)]
        yield dict.fromkeys(victims, fault)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    server = BucketServer(tmp_path / "storage")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield server
    server.close()


def finish_and_compare(run: Run, folder: Path) -> None:
    """The last attempt, which nothing disturbs, and a run that nothing ever disturbed."""
    newest = run.newest()
    last = run.start()
    assert last.finish(ATTEMPT) == [0] * run.hosts, last.everything()
    assert resumed_at(last.text()) == newest
    straight = Run(folder, f"{run.run_id}-undisturbed", run.hosts, {**run.config, "output": str(folder / "runs")})
    undisturbed = straight.start()
    assert undisturbed.finish(ATTEMPT) == [0] * run.hosts, undisturbed.everything()
    for key in ("first_loss", "last_loss", "final_weights_crc32c", "committed_step"):
        assert run.summary()[key] == straight.summary()[key], key
    lines = [[(line["step"], line["loss"]) for line in metrics.read_history(other.output)] for other in (run, straight)]
    assert lines[0][-1] == lines[1][-1]
    assert set(lines[0]) <= set(lines[1]), "a loss in the history is not the undisturbed one"
    history, steps = run.history(), run.config["train"]["steps"]
    assert sorted(history) == list(range(steps))
    for first in range(0, steps, EPOCH):
        records = sorted(record for step in range(first, first + EPOCH) for record in history[step])
        assert records == list(range(64)), f"epoch {first // EPOCH} did not train every record once"


def unavailable(bucket: BucketServer, request: Any) -> Any:
    return HttpResponse(503, b"busy")


def full(bucket: BucketServer, request: Any) -> Any:
    """What Google answers when a project's quota or its billing has ended."""
    refused = {
        "error": {
            "code": 403,
            "message": "The project exceeded its quota for this operation.",
            "errors": [{"reason": "quotaExceeded"}],
        }
    }
    return json_response(refused, 403) if request.method in ("POST", "PUT") else None


def silent(bucket: BucketServer, request: Any) -> Any:
    """The request is carried out, but its answer is lost."""
    bucket.api.answer(request)
    raise Disconnected


def from_write(number: int, bucket: BucketServer, fault: Callable[[BucketServer, Any], Any]) -> Callable[[Any], Any]:
    """The fault begins with the `number`-th write below a checkpoint and lasts."""
    written = itertools.count(1)
    begun = threading.Event()

    def answer(request: Any) -> Any:
        name = unquote(request.path + request.query.get("name", ""))
        if not begun.is_set() and request.method == "POST":
            body = request.body.read_all()
            request.body = Body(io.BytesIO(body), len(body), False)
            if (b"/checkpoints/" in body[:4096] or "/checkpoints/" in name) and next(written) >= number:
                begun.set()
        return fault(bucket, request) if begun.is_set() else None

    return answer


BUCKET_FAULTS = (full, unavailable, silent)


def kill(run: Run, faults: dict[int, Fault]) -> None:
    """One attempt in which the hosts of `faults` are killed; all promises about its end and its beginning."""
    newest = run.newest()
    attempt = run.start(faults)
    codes = attempt.finish(ATTEMPT)
    for worker, code in enumerate(codes):
        expected = -9 if worker in faults else Exit.LOST_PEER
        assert code == expected or (len(faults) > 1 and code in (-9, Exit.LOST_PEER)), (
            f"{faults}: {codes}\n{attempt.everything()}"
        )
    assert -9 in codes
    assert resumed_at(attempt.text(0)) == newest, attempt.everything()
    assert run.newest() >= newest


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("hosts", "kills", "seed"), ON_DISK)
def test_killed_at_any_point_on_a_disk(folder: Path, hosts: int, kills: int, seed: int) -> None:
    run = Run(folder, f"disk-{hosts}", hosts, config(folder, kills))
    for faults in draw_kills(kills, hosts, seed):
        kill(run, faults)
    finish_and_compare(run, folder)


@pytest.mark.timeout(SECONDS)
def test_killed_at_any_point_with_a_bucket_that_fails_too(folder: Path, bucket: BucketServer) -> None:
    """In turns a host is killed, and the bucket fails in one of its ways from some write of a checkpoint on."""
    run = Run(
        folder, "bucket", 2, config(folder, IN_BUCKET, output="gs://bucket/runs"), {"STORAGE_EMULATOR_HOST": bucket.url}
    )
    draw = random.Random(7)
    for number, faults in enumerate(draw_kills(IN_BUCKET, 2, seed=10)):
        if number % 2 == 0:
            kill(run, faults)
            continue
        newest = run.newest()
        bucket.fault = from_write(draw.randint(1, 4), bucket, BUCKET_FAULTS[number // 2 % len(BUCKET_FAULTS)])
        attempt = run.start()
        codes = attempt.finish(ATTEMPT)
        bucket.fault = lambda request: None
        assert Exit.FAILED in codes, attempt.everything()
        assert set(codes) <= {Exit.FAILED, Exit.LOST_PEER}, attempt.everything()
        assert "Traceback" not in attempt.text(0) + attempt.text(1)
        assert resumed_at(attempt.text(0)) == newest
        assert run.newest() >= newest
    finish_and_compare(run, folder)
