"""The lines of all attempts are one history; storage that refuses, is slow or loses an answer stops no training."""

import contextlib
import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import wait_until
from tests.training.numpy_backend import Runs
from training import run_end
from training import storage as default_storage
from training.config import Train
from training.distributed.shutdown import ShutdownRequest
from training.errors import BadInput, LostPeer, StopRequested
from training.optim.adamw import bias_corrections
from training.optim.schedule import learning_rate, step_seed
from training.run_setup import Dependencies
from training.storage import Stat, StorageError
from training.telemetry import metrics, writer
from training.telemetry.console import Console, warn
from training.telemetry.host_progress import PhaseTimer
from training.telemetry.metrics import AttemptInfo, MetricsLog, read_history
from training.telemetry.writer import MetricsWriter


def attempt(folder: Path, number: int, resumed_at: int, steps: Iterable[int], loss: float = 1.0) -> MetricsLog:
    """Returns the log of an attempt that has flushed these steps, each with a loss of its number and `loss`."""
    log = MetricsLog(AttemptInfo(str(folder), number, resumed_at))
    for step in steps:
        log.log(step, {"loss": step + loss})
    log.flush()
    return log


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_history(str(folder))]


def test_lines_are_buffered_and_written_in_small_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LINES", 4)
    log = MetricsLog(AttemptInfo(str(tmp_path), 0, 0))
    log.log(1, {"loss": 0.1 + 0.2})
    assert not (tmp_path / "metrics").exists()
    log.flush()
    for step in range(2, 8):
        log.log(step, {"loss": 1.0})
    log.finish()
    objects = sorted(path.name for path in (tmp_path / "metrics").iterdir())
    assert objects == ["attempt-0000.00000.jsonl", "attempt-0000.00001.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert lines[0]["loss"] == 0.1 + 0.2  # all digits


def test_a_run_without_attempt_numbers_never_overwrites_its_past(tmp_path: Path) -> None:
    for resumed_at in (0, 1):
        attempt(tmp_path, 0, resumed_at, [resumed_at + 1])
    assert steps_of(tmp_path) == [1, 2]


def test_an_attempt_that_resumes_beside_a_newer_one_hides_no_lines_of_it(tmp_path: Path) -> None:
    def fence() -> None:  # this attempt was suspended until the newer one had lines
        attempt(tmp_path, 1, 0, [1])
        raise BadInput("the run was started again")

    with pytest.raises(BadInput):
        MetricsLog(AttemptInfo(str(tmp_path), 0, 0), fence=fence).finish()
    assert steps_of(tmp_path) == [1]


def test_repeated_steps_are_in_the_history_once_and_a_truncated_line_is_left_out(tmp_path: Path, capsys: Any) -> None:
    attempt(tmp_path, 0, 0, (1, 2, 3, 4), 0.0)  # and then it was killed; the last commit was step 2
    [path] = (tmp_path / "metrics").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    attempt(tmp_path, 1, 2, (3, 5), 0.5)
    assert [line["loss"] for line in read_history(str(tmp_path))] == [1.0, 2.0, 3.5, 5.5]
    assert f"{path}: line 5 of 5 is not readable; left out" in capsys.readouterr().err


def train(**changes: Any) -> Train:
    return Train(**{"steps": 100, "global_batch_size": 8, "learning_rate": 1.0, "warmup_steps": 10, **changes})


def test_the_warm_up_is_one_step_ahead_of_hugging_faces_and_the_rest_is_the_same() -> None:
    def published(step: int) -> float:  # transformers.get_linear_schedule_with_warmup
        return step / 10 if step < 10 else (100 - step) / (100 - 10)

    for step in range(100):
        assert learning_rate(train(), step) == pytest.approx(published(step + 1 if step < 10 else step))


@pytest.mark.parametrize(
    ("changes", "step", "rate"),
    [
        ({"schedule": "cosine", "warmup_steps": 0}, 50, 0.5),
        ({"schedule": "cosine", "floor": 0.2}, 100, 0.2),
        *(({"schedule": "constant", "floor": 0.2}, step, 1.0) for step in (10, 50, 100)),
        ({"schedule": "wsd"}, 90, 0.5),  # the last fifth by default
        *(({"schedule": "wsd", "decay_steps": 40, "floor": 0.2}, step, 1.0) for step in (10, 60)),
        ({"schedule": "wsd", "decay_steps": 40, "floor": 0.2}, 80, 0.6),
        ({"schedule": "wsd", "decay_steps": 40, "floor": 0.2}, 100, 0.2),
    ],
)
def test_a_schedule_has_its_peak_its_decay_and_its_floor(changes: dict[str, Any], step: int, rate: float) -> None:
    assert learning_rate(train(**changes), step) == pytest.approx(rate)


def test_the_numbers_of_a_step_depend_on_the_step_alone() -> None:
    assert (learning_rate(train(), 0), *bias_corrections(train(), 0)) == (0.1, pytest.approx(0.1), pytest.approx(0.001))
    seeds = {step_seed(seed, step, host) for seed in range(3) for step in range(50) for host in range(4)}
    assert len(seeds) == 600
    assert all(0 <= seed < 2**31 for seed in seeds)


class Weather:
    """The storage of this machine, which refuses the first `refused` requests for metrics after it has done them."""

    def __init__(self, refused: int) -> None:
        self.refused = refused

    def __getattr__(self, name: str) -> Any:
        return getattr(default_storage, name)

    def write(self, url: str, data: Any, **options: Any) -> Stat:
        written = default_storage.write(url, data, **options)
        self._refuse(url)
        return written

    def listing(self, url: str) -> Any:
        self._refuse(url)
        return default_storage.listing(url)

    def _refuse(self, url: str) -> None:
        if "/metrics" in url and self.refused:
            self.refused -= 1
            raise StorageError(f"{url}: 503 Service Unavailable")


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)


def metrics_writer(folder: Path, storage: Any, warnings: list[str]) -> MetricsWriter:
    return MetricsWriter(lambda: MetricsLog(AttemptInfo(str(folder), 0, 0, storage=storage)), warnings.append)


@pytest.mark.parametrize("refused", range(8))
def test_each_line_is_written_once_however_often_storage_refuses(tmp_path: Path, refused: int) -> None:
    warnings: list[str] = []
    log = metrics_writer(tmp_path, Weather(refused), warnings)
    for step in range(1, 300):
        log.log(step, {"loss": 1.0})
    log.finish(30)
    assert steps_of(tmp_path) == list(range(1, 300))
    assert (tmp_path / "metrics.jsonl").exists()
    assert len(warnings) <= refused
    assert all("503 Service Unavailable; training continues" in message for message in warnings)


def test_an_attempt_killed_soon_has_said_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the history would keep steps of an earlier attempt that were done again, perhaps one that was not finite."""
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 600.0)
    attempt(tmp_path, 0, 0, [2], float("nan"))
    opened = threading.Event()

    def open_log() -> MetricsLog:
        log = MetricsLog(AttemptInfo(str(tmp_path), 1, 0))
        monkeypatch.setattr(log, "flush", lambda: (MetricsLog.flush(log), opened.set()))
        return log

    killed = MetricsWriter(open_log, warn)
    assert opened.wait(60)
    assert read_history(str(tmp_path)) == []
    killed.finish(60)


def test_a_commit_waits_for_its_metrics_unless_storage_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 1000.0)
    log, release = metrics_writer(tmp_path, default_storage, []), threading.Event()
    for step in range(1, 4):
        log.log(step, {"loss": 1.0})
        log.flush()
        assert steps_of(tmp_path) == list(range(1, step + 1))
    monkeypatch.setattr(writer, "FLUSH_LIMIT", 0.1)

    def open_late() -> MetricsLog:
        release.wait(60)
        return MetricsLog(AttemptInfo(str(tmp_path), 1, 3))

    hung, began = MetricsWriter(open_late, warn), time.monotonic()
    hung.flush()
    assert time.monotonic() - began < 30
    release.set()
    for each in (log, hung):
        each.finish(30)


def test_a_preempted_run_does_not_await_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(writer, "HURRIED_SECONDS", 0.2)
    shutdown, join = ShutdownRequest(), writer.join_thread
    request = threading.Timer(0.3, shutdown.request)  # while the end of the run waits for its metrics
    monkeypatch.setattr(writer, "join_thread", lambda *waiting: (request.start(), join(*waiting))[1])
    began = time.monotonic()
    weather = Weather(1_000_000)
    assert Runs(tmp_path, weather).train("r", 0, shutdown=shutdown, train__steps=4)["committed_step"] == 4
    assert time.monotonic() - began < 50
    weather.refused = 0  # lets the writer's thread end
    assert "the last metrics are not written: " in capsys.readouterr().err


def test_memory_is_bounded_while_storage_refuses_for_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_WAITING", 10)
    warnings: list[str] = []
    weather = Weather(0)
    log = metrics_writer(tmp_path, weather, warnings)
    wait_until((tmp_path / "metrics").exists)
    weather.refused = 1_000_000
    for step in range(1, 201):
        log.log(step, {"loss": 1.0})
        time.sleep(0.001)
    weather.refused = 0
    log.finish(10)
    written = steps_of(tmp_path)
    assert written[-10:] == list(range(191, 201))
    assert len(written) < 100
    assert warnings[-1] == f"{200 - len(written)} lines of metrics were lost: storage did not take them for too long"


def first_host(folder: Path, seconds: float = 300.0) -> Any:
    """A run of one host, as far as the record of its end needs it; other hosts would wait `seconds` for it."""
    config = SimpleNamespace(rendezvous=SimpleNamespace(seconds=seconds))
    return SimpleNamespace(
        folder=str(folder), record_url=str(folder / "attempts" / "attempt-0000.t.json"), timer=PhaseTimer(),
        console=Console(True), config=config, dependencies=Dependencies(), is_hurried=lambda: False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "failed"),
    [(StopRequested("SIGTERM"), False), (BadInput("a key"), True), (LostPeer("host 1"), True), (ValueError(), True)],
)
def test_the_trackers_of_an_attempt_learn_whether_it_failed(tmp_path: Path, error: Exception, failed: bool) -> None:
    ends: list[bool] = []
    log: Any = SimpleNamespace(finish=lambda seconds, *, failed, is_hurried: ends.append(failed))
    background = run_end.Background(log=log)
    with pytest.raises(type(error)), run_end.record_attempt_end(first_host(tmp_path), background):
        raise error
    assert ends == [failed]


@pytest.mark.parametrize(("end", "rendezvous", "error"), [(0.2, 300.0, None), (90.0, 0.4, BadInput("started again"))])
def test_recording_an_end_takes_no_longer_than_its_limit_or_than_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, end: float, rendezvous: float, error: BadInput | None
) -> None:
    monkeypatch.setattr(run_end, "END_SECONDS", end)
    release = threading.Event()
    uploader: Any = SimpleNamespace(close=lambda: release.wait(60))
    run, background = first_host(tmp_path, rendezvous), run_end.Background(uploader=uploader)
    began = time.monotonic()
    with contextlib.suppress(BadInput), run_end.record_attempt_end(run, background):
        if error:
            raise error
    assert time.monotonic() - began < 30
    recording = next(thread for thread in threading.enumerate() if thread.name == "attempt-end")
    release.set()
    recording.join(30)
    assert "is not recorded in" in capsys.readouterr().err
