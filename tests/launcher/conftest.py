"""Fixtures of several files."""

from pathlib import Path

import pytest

from tests.launcher.script_host import ScriptHost


@pytest.fixture
def host(tmp_path: Path) -> ScriptHost:
    """A host on which scripts run."""
    return ScriptHost(tmp_path / "host")
