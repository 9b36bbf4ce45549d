"""Dropout without a generator: its rates, and that what is dropped in one place says nothing about another."""

import numpy as np
import pytest
import torch

from training.models.torch.dropout import Dropout, DropoutNoise, row_keys

ROWS, HEADS, LENGTH, RATE = 16, 4, 128, 0.1
SHAPE = torch.Size((ROWS, HEADS, LENGTH, LENGTH))  # a million elements


def kept(seed: int = 1, step: int = 0, place: int = 0, rate: float = RATE, shape: torch.Size = SHAPE) -> np.ndarray:
    noise = DropoutNoise(HEADS * LENGTH)
    noise.rows = torch.from_numpy(row_keys(seed, step, 0, shape[0]))
    return noise.kept(shape, rate, place).numpy()


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """In standard deviations of what independent ones have."""
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1] * np.sqrt(one.size))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_the_rate_that_was_asked_for(rate: float) -> None:
    found = kept(rate=rate)
    assert found.mean() == pytest.approx(1 - rate, abs=5 * np.sqrt(rate * (1 - rate) / found.size))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_along_each_axis_as_many_are_kept_as_chance_keeps(axis: int) -> None:
    """The variance of counts is that of independent draws: there are neither stripes nor evenly spread gaps."""
    assert kept().sum(axis).var() / (SHAPE[axis] * RATE * (1 - RATE)) == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("apart", [1, 2, 3])
def test_neighbours_say_nothing_about_each_other(axis: int, apart: int) -> None:
    found = kept()
    assert abs(correlation(found, np.roll(found, apart, axis))) < 5


@pytest.mark.parametrize("change", [{"seed": 2}, {"step": 1}, {"place": 1}, {"place": 2}])
def test_seeds_steps_and_places_say_nothing_about_each_other(change: dict[str, int]) -> None:
    assert abs(correlation(kept(), kept(**change))) < 5


def test_corners_of_rectangles_are_nearly_independent() -> None:
    found = (kept() - (1 - RATE)) / np.sqrt(RATE * (1 - RATE))
    corners = found[..., :-1, :-1] * found[..., 1:, :-1] * found[..., :-1, 1:] * found[..., 1:, 1:]
    assert abs(corners.mean()) < 0.02


def test_a_row_drops_the_same_whichever_other_rows_are_there() -> None:
    noise = DropoutNoise(HEADS * LENGTH)
    noise.rows = torch.from_numpy(row_keys(1, 0, 5, 7))
    assert (noise.kept(torch.Size((2, *SHAPE[1:])), RATE, 0).numpy() == kept()[5:7]).all()


def test_what_stays_is_scaled_and_evaluation_drops_nothing() -> None:
    noise = DropoutNoise(1000)
    noise.rows = torch.from_numpy(row_keys(1, 0, 0, 8))
    module, values = Dropout(0.5, 0, noise), torch.ones(8, 1000)
    assert set(module(values).unique().tolist()) == {0.0, 2.0}
    assert module.eval()(values) is values
