"""Random numbers without state: a 64-bit integer for each (seed, purpose, numbers...), the same on every platform.

Random decisions of a run derive from the configuration's one `seed`. Those that are functions of records and rows are
derived here, each for a purpose:

  "blocks"               the order of blocks in an epoch (`sampling.order`), by epoch
  "lanes", "uneven"      the order of records in a window, and the uneven window, by (epoch, window) and by epoch
  "buckets"              the order of batch lengths (`sampling.order`), by epoch
  "masking"              which tokens are predicted (`sampling.masking`), by (epoch, record)
  "dropout"              keep masks in PyTorch (`models.torch.dropout`), by (step, row)

A length bucket of labelled rows shuffles with a seed of its own, `bucket_seed`: otherwise buckets of one size would be
shuffled alike. Evaluation uses seed 0 and epoch -1, so that its masks are the same in every run.

Two more generators derive from the same `seed` and stay as they are, because old checkpoints and golden losses depend
on them: `optim.schedule.step_seed` seeds a framework's own dropout by (step, host), and `models.initial` draws initial
weights by the name of the weight.

SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of David
Stafford's variant 13):

    state += 0x9E3779B97F4A7C15;  z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;  return z ^ (z >> 31)

Only additions, multiplications, shifts and exclusive-ors of unsigned 64-bit integers, so that every library gives the
same numbers.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
UInts = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def mix_int(z: int) -> int:
    """Applies SplitMix64's output function to the lowest 64 bits of a Python integer."""
    return int(mix(np.array([z % 2**64], np.uint64))[0])


def mix(z: UInts) -> UInts:
    """Applies SplitMix64's output function to an array of any shape in place, and returns it."""
    scratch = z >> np.uint64(30)
    z ^= scratch
    z *= np.uint64(FIRST)
    np.right_shift(z, np.uint64(27), out=scratch)
    z ^= scratch
    z *= np.uint64(SECOND)
    np.right_shift(z, np.uint64(31), out=scratch)
    z ^= scratch
    return z


def key(seed: int, purpose: str, *numbers: int) -> int:
    """Returns a 64-bit key of (seed, purpose, numbers...); their order matters."""
    state = mix_int(seed + GOLDEN)
    for number in (int.from_bytes(purpose.encode(), "little"), *numbers):
        while True:  # 64 bits at a time
            state = mix_int(state + mix_int(number + GOLDEN))
            number >>= 64
            if number in (0, -1):
                break
    return state


def bucket_seed(seed: int, length: int) -> int:
    """Returns the seed that shuffles the bucket of rows of `length` tokens."""
    return seed + length


def keys(state: int | UInts, numbers: npt.NDArray[np.int64]) -> UInts:
    """Returns (n,) keys: `state`, one key or (n,), each extended by its number of `numbers` (n,). keys(key(...),
    [n])[0] == key(..., n) for -1 <= n < 2**63."""
    inner = numbers.astype(np.uint64)
    inner += np.uint64(GOLDEN)
    mix(inner)
    inner += np.asarray(state, np.uint64)
    return mix(inner)


def stream(seed: int, purpose: str, epoch: int, count: int, number: int = 0) -> UInts:
    """Returns random integers: SplitMix64 started at the key of (seed, purpose, epoch, number). (count,)"""
    state = key(seed, purpose, epoch, number)
    return counted(np.uint64(state), np.arange(count, dtype=np.uint64))


def counted(state: npt.ArrayLike, index: UInts) -> UInts:
    """Returns output number `index` (from 0) of the generators that start at `state`; any shapes that broadcast."""
    z = np.asarray(state, np.uint64) + (index + np.uint64(1)) * np.uint64(GOLDEN)
    return mix(z)
