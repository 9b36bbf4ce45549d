"""Fixtures of several files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.images.registry import ADDRESS
from tests.launcher.emulated_gcloud import Cloud
from tests.launcher.script_host import SHELLS, ScriptHost
from tests.launcher.test_runs import Hosts, Workstation
from tests.servers import BucketServer, RegistryServer


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `home` in the test's folder the launcher's, in place of the user's `.tpu-launch`, and sets an account."""
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", "ann@example.com")
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "home"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """Cloud Storage, in the test's folder."""
    server = BucketServer(tmp_path / "storage")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield server
    server.close()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryServer]:
    """A registry, which this process's client reaches under any name."""
    server = RegistryServer(tmp_path / "registry")
    monkeypatch.setenv(ADDRESS, server.address)
    monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
    yield server
    server.close()


@pytest.fixture
def host(tmp_path: Path) -> ScriptHost:
    """A host on which scripts run."""
    return ScriptHost(tmp_path / "host")


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    """A shell that hosts may have as `sh`."""
    return str(request.param)


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def work(tmp_path: Path) -> Workstation:
    return Workstation(tmp_path, Hosts())
