"""These tests need Apache Beam, so they run in the environment for it in the tensorflow image's test stage.

`make test` does that, and `.venv/bin/python tools/container_tests.py beam [pytest's arguments]`.
"""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("apache_beam") is None:
    raise pytest.UsageError("tests/beam runs inside the image: use .venv/bin/python tools/container_tests.py beam")
