"""Before the first step all hosts have the same facts and output folder, or the run stops and says who differs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.container import small_runs
from training import run_setup
from training.config import TrainerConfig
from training.distributed.agreement import agree, claim, disagreements
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput


def test_all_hosts_that_differ_from_host_0_are_named() -> None:
    told = [{"code": code, "configuration": configuration} for code, configuration in ("ax", "ay", "bx")]
    assert disagreements(told) == ["code: host 0 has a, host 2 b", "configuration: host 0 has x, host 1 y"]
    assert disagreements(told[:1] * 3) == []


def test_hosts_that_agree_get_a_token() -> None:
    assert agree(SingleHost(), {"code": "a"}, 1) != agree(SingleHost(), {"code": "a"}, 1)


class Pair(SingleHost):
    """Two hosts, the other of which says what it is told to."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        return [payload, self.other]


def test_an_output_that_another_host_can_not_see_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(0, ("a", "b"), attempt=3)
    claim(str(tmp_path), cluster, Pair(True), "t", {"config": {}})
    assert [each.name for each in (tmp_path / "attempts").iterdir()] == ["attempt-0003.t.json"]
    with pytest.raises(BadInput, match=r"not one folder for all hosts: .*and host 1 can't see it"):
        claim(str(tmp_path), cluster, Pair(False), "u", {"config": {}})


def test_an_output_that_can_not_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="output: "):
        claim(str(tmp_path / "file"), Cluster(0, ("a",)), SingleHost(), "t", {})


def test_a_framework_opens_the_devices_within_the_limit_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow connects to the other hosts there, and initialises their devices; torch_xla opens its own."""
    limits: list[tuple[str, float]] = []

    class Limited(SingleHost):
        @contextlib.contextmanager
        def limit(self, what: str, seconds: float) -> Iterator[None]:
            limits.append((what, seconds))
            yield
            limits.clear()

    def open_devices(*_: object) -> Any:
        opened.extend(limits)
        return SimpleNamespace(devices=1)

    opened: list[tuple[str, float]] = []
    monkeypatch.setattr(run_setup, "_import_for_devices", lambda *_: open_devices)
    monkeypatch.setattr(run_setup, "set_device_environment", lambda *_: None)
    config = TrainerConfig.model_validate(small_runs.document(Path("none"), rendezvous={"start_seconds": 7}))
    data = SimpleNamespace(tokens=SimpleNamespace(vocabulary=9, pad=0, end=None), sequence_length=8)
    run_setup.open_backend(config, Cluster(0, ("a",)), Limited(), cast(Any, SimpleNamespace(data=data, labels=None)))
    assert opened == [("opening the devices", 7)]
