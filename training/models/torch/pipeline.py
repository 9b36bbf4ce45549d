"""Predictions with plain torch on the CPU."""

from __future__ import annotations

from typing import Any


def open_pipeline(name: str, folder: str) -> Any:
    """Returns `transformers.pipeline(name)` over a local model folder, on the CPU."""
    from transformers import pipeline

    return pipeline(name, model=folder, framework="pt", device="cpu")
