"""Claims about what the tensorflow image holds: models of transformers, made of Keras 2, compute and differentiate;
nothing is there twice."""

from __future__ import annotations

import os
from importlib.metadata import packages_distributions

import numpy as np
import tensorflow as tf
import tf_keras
from transformers import BertConfig, TFAutoModelForMaskedLM, TFAutoModelForSequenceClassification

SMALL = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=3
)


def test_one_package_owns_tensorflow() -> None:
    assert len(set(packages_distributions()["tensorflow"])) == 1


def test_the_models_use_tf_keras() -> None:
    assert tf.keras.Model is tf_keras.Model


def test_models_of_both_tasks_compute_and_differentiate() -> None:
    ids = tf.constant(np.arange(24).reshape(2, 12))
    for kind, shape in ((TFAutoModelForMaskedLM, (2, 12, 100)), (TFAutoModelForSequenceClassification, (2, 3))):
        model = kind.from_config(SMALL)
        assert isinstance(model, tf_keras.Model)
        with tf.GradientTape() as tape:
            logits = model(ids).logits
            loss = tf.reduce_mean(logits**2)
        assert logits.shape == shape
        gradients = [each for each in tape.gradient(loss, model.trainable_variables) if each is not None]
        assert gradients
        assert all(np.isfinite(tf.convert_to_tensor(each).numpy()).all() for each in gradients)


def test_it_runs_as_an_ordinary_user() -> None:
    assert os.getuid() == 1000
