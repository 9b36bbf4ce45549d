"""These tests need TensorFlow, so they run inside the tensorflow image: `make test` does that, and
`.venv/bin/python tools/container_tests.py tensorflow [pytest's arguments]`."""

import importlib.util

import pytest

if importlib.util.find_spec("tensorflow") is None:
    raise pytest.UsageError(
        "tests/tensorflow runs inside the image: use .venv/bin/python tools/container_tests.py tensorflow"
    )
