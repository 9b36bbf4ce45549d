"""Claims about a snapshot on its way: the loop goes on, and waits for it before it changes what is being copied."""

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from training.checkpoint.snapshot import Snapshot, find_nonfinite
from training.checkpoint.tensors import TensorSpec


class Place:
    """Memory that can be written from a moment on."""

    def __init__(self) -> None:
        self.content, self.opened = np.zeros(3, np.float32), threading.Event()

    def __setitem__(self, key: Any, value: np.ndarray) -> None:
        assert self.opened.wait(10), "it was not opened"
        self.content[key] = value


def test_the_loop_goes_on_and_is_held_up_before_the_change() -> None:
    place, state = Place(), np.arange(3, dtype=np.float32)
    snapshot = Snapshot([(place, state)])  # type: ignore[list-item]
    assert not place.content.any()
    threading.Timer(0.2, place.opened.set).start()
    began = time.monotonic()
    snapshot.wait_before_mutation()
    waited = time.monotonic() - began
    state += 1
    assert list(place.content) == [0, 1, 2]
    assert 0.1 < snapshot.blocked_seconds <= waited
    before = snapshot.blocked_seconds
    snapshot.wait()  # the saver's thread: that costs the loop nothing
    assert snapshot.blocked_seconds == before


@pytest.mark.parametrize("place", [0, 1 << 18, -1])
@pytest.mark.parametrize(
    ("dtype", "unsigned", "one", "values"),
    [
        ("F32", np.uint32, 0x3F800000, (0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000)),
        ("F16", np.uint16, 0x3C00, (0x7E00, 0x7C00, 0xFC00)),
        ("BF16", np.uint16, 0x3F80, (0x7FC0, 0xFFC0, 0x7F80, 0xFF80)),
    ],
)
def test_a_value_that_is_not_finite_is_found_anywhere_in_a_large_tensor(
    dtype: str, unsigned: type[np.unsignedinteger[Any]], one: int, values: tuple[int, ...], place: int
) -> None:
    tensor = np.full((1 << 19) + 1, one, unsigned)
    data = memoryview(tensor).cast("B")
    tensors = {"model/w": (TensorSpec(dtype, tensor.shape, data.nbytes), data)}
    assert find_nonfinite(tensors) is None
    for value in values:
        tensor[place] = value
        assert find_nonfinite(tensors) == "model/w"


def test_what_was_copied_is_let_go() -> None:
    """A reference to a device's memory that is kept costs the next step a copy of the state."""
    state = np.ones(3, np.float32)
    gone = weakref.ref(state)
    snapshot = Snapshot([(np.empty(3, np.float32), state)])
    snapshot.wait()
    del state
    gc.collect()
    assert gone() is None


def test_a_copy_that_fails_is_told_to_the_loop_and_to_the_saver() -> None:
    snapshot = Snapshot([(np.empty(2, np.float32), np.ones(3, np.float32))])
    for wait in (snapshot.wait_before_mutation, snapshot.wait):
        with pytest.raises(ValueError, match="could not broadcast"):
            wait()
