"""The tensorflow image has one TensorFlow, one Keras, and an ordinary user."""

import os
from importlib.metadata import packages_distributions

import tensorflow as tf
import tf_keras


def test_one_package_owns_tensorflow_and_its_models_use_tf_keras() -> None:
    assert len(set(packages_distributions()["tensorflow"])) == 1
    assert tf.keras.Model is tf_keras.Model


def test_it_runs_as_an_ordinary_user() -> None:
    assert os.getuid() == 1000
