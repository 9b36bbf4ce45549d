"""Fresh weights are functions of seed, name and shape, so that all frameworks and hosts start from the same numbers."""

import google_crc32c
import numpy as np

from training.models.initial import initial_weight, initial_weights

EMBEDDING = "bert.embeddings.word_embeddings.weight"


def test_the_numbers_are_these_wherever_they_are_made() -> None:
    """Pinned: images have numpy versions of their own, and a checkpoint's `seed` means these weights."""
    values = initial_weight("bert.pooler.dense.weight", (300, 200), seed=1)
    assert google_crc32c.value(values.tobytes()) == 0x65E30AAF
    assert values.dtype == np.float32


def test_weights_are_normal_with_the_given_deviation() -> None:
    values = initial_weight("classifier.weight", (400, 300), seed=0, deviation=0.05)
    assert abs(values.mean()) < 0.001
    assert abs(values.std() - 0.05) < 0.001


def test_biases_are_zero_norms_are_one_and_padding_is_zero() -> None:
    assert not initial_weight("cls.predictions.bias", (9,), seed=1).any()
    assert (initial_weight("bert.embeddings.LayerNorm.weight", (9,), seed=1) == 1).all()
    padded = initial_weight(EMBEDDING, (9, 4), seed=1, pad=3)
    assert not padded[3].any()
    assert np.array_equal(np.delete(padded, 3, 0), np.delete(initial_weight(EMBEDDING, (9, 4), seed=1), 3, 0))
    positions = "roberta.embeddings.position_embeddings.weight"
    assert not initial_weight(positions, (9, 4), seed=1, model_type="roberta", pad=1)[1].any()
    assert initial_weight(positions.replace("roberta", "bert"), (9, 4), seed=1, pad=1)[1].any()


def test_weights_that_are_made_together_are_those_of_one_after_another() -> None:
    parameters = [(f"layer.{number}.weight", (number + 1, 7)) for number in range(40)] + [("norm.bias", (3,))]
    together = list(initial_weights(parameters, seed=3, deviation=0.05))
    assert len(together) == len(parameters)
    for (name, shape), values in zip(parameters, together, strict=True):
        assert np.array_equal(values, initial_weight(name, shape, seed=3, deviation=0.05))
