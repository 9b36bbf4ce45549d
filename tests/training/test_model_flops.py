"""The model's own arithmetic, from its sizes."""

import numpy as np
import pytest

from training.models.flops import WorkCounter, flops_per_row, mfu, peak_flops

BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "vocab_size": 30522}


def test_bert_base_costs_six_flops_a_weight_and_token_and_its_attention() -> None:
    """85 million weights in the layers; the head is a dense layer and the vocabulary, at 20 places of 128."""
    layers = 12 * (4 * 768**2 + 2 * 768 * 3072)
    expected = 128 * 6 * layers + 12 * 12 * 128 * 128 * 768 + 20 * 6 * (768**2 + 768 * 30522)
    assert flops_per_row(BERT_BASE, 128, 20) == pytest.approx(expected)
    assert flops_per_row({**BERT_BASE, "id2label": {"0": "a", "1": "b"}}, 128, None) < flops_per_row(BERT_BASE, 128, 20)


def test_work_counts_the_rows_of_all_hosts() -> None:
    work = WorkCounter(BERT_BASE, hosts=4)
    work.add({"input_ids": np.zeros((8, 128)), "positions": np.zeros((8, 20))})
    assert (work.tokens, work.flops) == (4 * 8 * 128, 32 * flops_per_row(BERT_BASE, 128, 20))


def test_mfu_is_told_on_known_tpus_only() -> None:
    assert peak_flops("v4-32", "TPU") == 16 * 275e12
    assert [peak_flops("v4-32", "CPU"), peak_flops(None, "TPU"), peak_flops("v99-8", "TPU")] == [None, None, None]
    assert mfu(275e12, 2.0, 275e12) == 0.5
    assert mfu(1.0, 1.0, None) is None
    assert flops_per_row({"dim": 768}, 128, 20) == 0.0  # a family that names its sizes otherwise
    assert mfu(0.0, 1.0, 275e12) is None
