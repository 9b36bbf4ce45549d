"""Tests that need TensorFlow: `make test` runs them inside the image, as does tools/container_tests.py."""

import importlib.util

import pytest

if importlib.util.find_spec("tensorflow") is None:
    raise pytest.UsageError(
        "tests/tensorflow runs inside the image: use .venv/bin/python tools/container_tests.py tensorflow"
    )
