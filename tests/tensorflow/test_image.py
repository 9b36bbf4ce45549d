"""The tensorflow image has one TensorFlow, one Keras, and an ordinary user."""

import os
from importlib.metadata import packages_distributions

import tensorflow as tf
import tf_keras


def test_there_is_one_tensorflow_with_tf_keras_and_an_ordinary_user() -> None:
    assert len(set(packages_distributions()["tensorflow"])) == 1
    assert tf.keras.Model is tf_keras.Model
    assert os.getuid() == 1000
