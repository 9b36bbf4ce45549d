"""A bucket that can misbehave."""

from collections.abc import Iterator

import pytest

from tests.servers import BucketServer


@pytest.fixture
def gcs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """gs://bucket on this machine, with short time-outs."""
    from training.storage import gcs as bucket

    server = BucketServer(tmp_path_factory.mktemp("storage"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    quick = bucket.Timeouts(connect=2, silence=1, deadline=8, first_delay=0.005, longest_delay=0.05)
    monkeypatch.setattr(bucket, "timeouts", quick)
    yield server
    server.close()
