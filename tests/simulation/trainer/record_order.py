"""The order of records, stated a second time: plain Python, for datasets of one window. Only SplitMix64 is
the trainer's: tests/training/test_sampling.py holds it to its published numbers.

An epoch has one permutation of all records, drawn by (seed, epoch). Places are counted through all epochs; place p is
row p % batch of step p // batch. The permutation fills the epoch's places row by row, and in a row step by step.
"""

from training.data.sampling.random_bits import GOLDEN, mix_int


def batches(records: int, batch: int, steps: int, seed: int) -> list[list[int]]:
    """Returns the records of the first `steps` batches, each in the order of its rows."""
    rows = [[-1] * batch for _ in range(steps)]
    for epoch in range(-(-steps * batch // records)):
        places = sorted(range(epoch * records, (epoch + 1) * records), key=lambda place: (place % batch, place))
        for place, record in zip(places, _permutation(records, seed, epoch), strict=True):
            if place < steps * batch:
                rows[place // batch][place % batch] = record
    return rows


def _permutation(records: int, seed: int, epoch: int) -> list[int]:
    """Sorts records by the outputs of SplitMix64, started at a key of (seed, "lanes", epoch, window 0)."""
    state = mix_int(seed + GOLDEN)
    for number in (int.from_bytes(b"lanes", "little"), epoch, 0):
        state = mix_int(state + mix_int(number + GOLDEN))
    return sorted(range(records), key=lambda record: mix_int(state + (record + 1) * GOLDEN))
