"""The seed of a framework's own random numbers in a step, as a pure function."""

import hashlib


def step_seed(seed: int, step: int, host: int) -> int:
    """Returns the seed of dropout for one step on one host (its worker number), in [0, 2**31)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{host}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
