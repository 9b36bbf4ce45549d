"""The weights of a fresh network, the same in every framework: each is a pure function of the seed, its name and its
shape.

Names and shapes are PyTorch's, as in a checkpoint (`bert.encoder.layer.0.output.dense.weight`). The rule is that of
BERT (https://github.com/google-research/bert): normal with a standard deviation of `initializer_range`, biases 0,
norms 1, and 0 for the padding token.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from training.data.loading.reader import prefetch

# Embeddings with a row for the padding token. RoBERTa's positions count from that token's number + 1.
_PADDED = {
    "bert": ("embeddings.word_embeddings.weight",),
    "roberta": ("embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"),
}


def initial_weight(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    deviation: float = 0.02,
    model_type: str = "bert",
    pad: int | None = None,
) -> npt.NDArray[np.float32]:
    """Returns the fp32 initial value of the parameter with PyTorch's `name` and `shape`: 0 for a bias, 1 for any other
    of one axis (a norm's), else normal with standard deviation `deviation`, decided by `seed` and `name`. The row `pad`
    (None: none) of word embeddings, and of RoBERTa's positions (by `model_type`), is 0."""
    if name.rpartition(".")[2] == "bias":
        return np.zeros(shape, np.float32)
    if len(shape) == 1:  # of a norm
        return np.ones(shape, np.float32)
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32) * np.float32(deviation)
    if pad is not None and name.endswith(_PADDED.get(model_type, _PADDED["bert"])):
        values[pad] = 0
    return values


def initial_weights(
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    *,
    seed: int,
    deviation: float = 0.02,
    model_type: str = "bert",
    pad: int | None = None,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yields `initial_weight` of each parameter (name, shape), in order. Every processor makes one at a time, ahead of
    the caller: a single one takes seconds for bert-large."""

    def make(number: int) -> npt.NDArray[np.float32]:
        return initial_weight(*parameters[number], seed=seed, deviation=deviation, model_type=model_type, pad=pad)

    workers = os.cpu_count() or 1  # numpy releases Python's lock
    return prefetch(make, 0, workers, stop=len(parameters), threads=workers)
