"""Tests that need a framework: `make test` runs them inside the image, as does tools/container_tests.py."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch_xla") is None and importlib.util.find_spec("tensorflow") is None:
    raise pytest.UsageError("tests/container runs inside the image: use .venv/bin/python tools/container_tests.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and small datasets of packed rows."""
    from tests.container import small_runs

    return small_runs.prepare(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def hub() -> Iterator[Any]:
    """An empty Hub of Hugging Face."""
    from tests.container.hub import Hub

    server = Hub()
    yield server
    server.close()
