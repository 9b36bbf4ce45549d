"""The order of records, stated a second time: plain Python, without the trainer's code, for datasets of one window.

An epoch has one permutation of all records, drawn by (seed, epoch). Places are counted through all epochs; place p is
row p % batch of step p // batch. The permutation fills the epoch's places row by row, and in a row step by step.
"""

_ALL, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


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
    state = _mix(seed + _GOLDEN)
    for number in (int.from_bytes(b"lanes", "little"), epoch, 0):
        state = _mix(state + _mix(number + _GOLDEN))
    return sorted(range(records), key=lambda record: _mix(state + (record + 1) * _GOLDEN))


def _mix(z: int) -> int:
    z &= _ALL
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _ALL
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _ALL
    return z ^ (z >> 31)
