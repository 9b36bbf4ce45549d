"""Storage that refuses, is slow or loses an answer stops no training: lines are written later, once, or named."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.numpy_backend import Runs
from training import run_end
from training import storage as default_storage
from training.distributed.shutdown import ShutdownRequest
from training.errors import BadInput, LostPeer, StopRequested
from training.storage import Stat, StorageError
from training.telemetry import writer
from training.telemetry.console import Console, warn
from training.telemetry.host_progress import PhaseTimer
from training.telemetry.metrics import AttemptInfo, MetricsLog, read_history
from training.telemetry.writer import MetricsWriter


class Weather:
    """The storage of this machine, which refuses the first `refused` requests for metrics after it has done them."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.refused_after_opening = False

    def __getattr__(self, name: str) -> Any:
        return getattr(default_storage, name)

    def write(self, url: str, data: Any, **options: Any) -> Stat:
        written = default_storage.write(url, data, **options)
        self._refuse(url)
        return written

    def listing(self, url: str) -> Any:
        if not self.refused_after_opening:
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
    assert [line["step"] for line in read_history(str(tmp_path))] == list(range(1, 300))
    assert (tmp_path / "metrics.jsonl").exists()
    assert len(warnings) <= refused
    assert all("503 Service Unavailable; training continues" in message for message in warnings)


def test_an_attempt_killed_soon_has_said_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the history would keep steps of an earlier attempt that were done again, perhaps one that was not finite."""
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 600.0)
    failed = MetricsLog(AttemptInfo(str(tmp_path), 0, 0))
    failed.log(2, {"loss": float("nan")})
    failed.flush()
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
        assert [line["step"] for line in read_history(str(tmp_path))] == list(range(1, step + 1))
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


def test_a_preempted_run_does_not_wait_for_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "HURRIED_SECONDS", 0.2)
    shutdown = ShutdownRequest()
    threading.Timer(1, shutdown.request).start()
    began = time.monotonic()
    weather = Weather(1_000_000)
    assert Runs(tmp_path, weather).train("r", 0, shutdown=shutdown, train__steps=4)["committed_step"] == 4
    assert time.monotonic() - began < 20
    weather.refused = 0  # lets the writer's thread end
    assert "the last metrics are not written: " in capsys.readouterr().err


def test_memory_is_bounded_while_storage_refuses_for_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_WAITING", 10)
    warnings: list[str] = []
    weather = Weather(1_000_000)
    weather.refused_after_opening = True
    log = metrics_writer(tmp_path, weather, warnings)
    for step in range(1, 201):
        log.log(step, {"loss": 1.0})
        time.sleep(0.001)
    weather.refused = 0
    log.finish(10)
    written = [line["step"] for line in read_history(str(tmp_path))]
    assert written[-10:] == list(range(191, 201))
    assert len(written) < 100
    assert warnings[-1] == f"{200 - len(written)} lines of metrics were lost: storage did not take them for too long"


def test_slow_storage_does_not_delay_the_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_end, "END_SECONDS", 0.2)
    release = threading.Event()
    monkeypatch.setattr("training.telemetry.report.write_report", lambda *_, **__: release.wait(30))
    assert Runs(tmp_path).train("r", 0)["steps"] == 40
    release.set()
    assert "is not recorded in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "failed"),
    [(StopRequested("SIGTERM"), False), (BadInput("a key"), True), (LostPeer("host 1"), True), (ValueError(), True)],
)
def test_the_trackers_of_an_attempt_learn_whether_it_failed(tmp_path: Path, error: Exception, failed: bool) -> None:
    ends: list[bool] = []
    log: Any = SimpleNamespace(finish=lambda seconds, *, failed, is_hurried: ends.append(failed))
    context = run_end.AttemptContext(Console(True), log)
    url = str(tmp_path / "attempts" / "attempt-0000.t.json")
    with pytest.raises(type(error)), run_end.record_attempt_end(str(tmp_path), url, PhaseTimer(), context, warn):
        raise error
    assert ends == [failed]


def test_recording_an_error_takes_less_than_others_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()
    context = run_end.AttemptContext(Console(True), close=[lambda: release.wait(60)])
    began = time.monotonic()
    with (
        pytest.raises(BadInput, match="started again"),
        run_end.record_attempt_end(
            str(tmp_path), str(tmp_path / "attempts" / "a.json"), PhaseTimer(), context, warn, patience=0.4
        ),
    ):
        raise BadInput("the run was started again")
    assert time.monotonic() - began < 30
    release.set()
    assert "is not recorded in" in capsys.readouterr().err
