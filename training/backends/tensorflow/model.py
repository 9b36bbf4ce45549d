"""Networks for the TensorFlow backend: transformers' Keras 2 models under PyTorch's names, their start, their dropout,
and the sums of each task.

A checkpoint and a model folder know parameters by PyTorch's names and shapes, whichever backend wrote them. In
TensorFlow a dense layer's kernel is the transpose of PyTorch's weight; everything else has the same shape. Nothing here
needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from training import storage
from training.checkpoint.safetensors_file import Damaged, decode
from training.config import Model
from training.errors import BadInput
from training.models.hugging_face import (
    FAMILIES,
    HEAD,
    WEIGHTS,
    ModelRequirements,
    build_model_config,
    check_capacity,
    read_config,
    read_labels,
)
from training.models.initial import initial_weight
from training.storage.hub import model_folder

_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16}

Array = npt.NDArray[np.float32]
Sums = Callable[[Any, Mapping[str, Any], bool], tuple[Any, Any]]


@dataclass(frozen=True)
class Parameter:
    """A variable under its PyTorch name. Arrays that come and go have PyTorch's shape."""

    name: str
    variable: Any
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.variable.shape)
        return shape[::-1] if self.transposed else shape

    @property
    def decayed(self) -> bool:
        """Whether weight decay is for it: not for biases and norms."""
        return not self.name.endswith("bias") and len(self.shape) > 1

    def of(self, variable: Any) -> Array:
        """The value of this variable, or of one beside it, as PyTorch has it."""
        value: Array = variable.numpy()
        return np.ascontiguousarray(value.T if self.transposed else value)

    def put(self, variable: Any, value: Array) -> None:
        variable.assign(value.T if self.transposed else value)


class Noise:
    """The seed of dropout inside the step that is being traced: a tensor, so that one program serves all steps."""

    def __init__(self) -> None:
        self.seed: Any = None  # (2,) int32


def build(
    model: Model, needs: ModelRequirements, *, dropout: float, seed: int, noise: Noise
) -> tuple[Any, list[Parameter]]:
    """A masked-language model, or for data with labels a classifier, and its parameters. The same weights on every
    host, and as in `torch_model`.

    Raises BadInput for a folder that is not a model's, or not this one's."""
    values = build_model_config(model, vocabulary=needs.vocabulary, pad=needs.pad, dropout=dropout, labels=needs.labels)
    if values.get("model_type") not in FAMILIES:
        raise BadInput(
            f"model.path {model.path} is a {values.get('model_type')} model, and backend: tensorflow trains one of: {', '.join(FAMILIES)}"
        )
    kind = "MaskedLM" if needs.labels is None else "SequenceClassification"
    if model.path is not None:
        values = {
            **values,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
            "classifier_dropout": dropout,
        }
    network = _network(values, kind)
    check_capacity(network.config, needs)
    count_positions(network)
    network.build_in_name_scope()
    parameters = _parameters(network)
    found = {} if model.path is None else _from_folder(model.path, parameters, values, needs.labels is not None)
    about = {
        "deviation": network.config.initializer_range,
        "model_type": values["model_type"],
        "pad": network.config.pad_token_id,
    }
    for each in parameters:
        value = found.get(each.name)
        each.put(each.variable, initial_weight(each.name, each.shape, seed=seed, **about) if value is None else value)
    _stateless_dropout(network, noise)
    return network, parameters


def _network(values: dict[str, Any], kind: str) -> Any:
    if values["model_type"] == "roberta":
        from transformers.models.roberta import modeling_tf_roberta as networks
        from transformers.models.roberta.configuration_roberta import RobertaConfig as Config
    else:
        from transformers.models.bert import modeling_tf_bert as networks
        from transformers.models.bert.configuration_bert import BertConfig as Config
    return getattr(networks, f"TF{FAMILIES[values['model_type']]}For{kind}")(Config(**values))


def _parameters(network: Any) -> list[Parameter]:
    from transformers.modeling_tf_pytorch_utils import TransposeType, convert_tf_weight_name_to_pt_weight_name

    found = []
    for variable in network.trainable_variables:
        name, transposed = convert_tf_weight_name_to_pt_weight_name(variable.name, tf_weight_shape=variable.shape)
        found.append(Parameter(name, variable, transposed is TransposeType.SIMPLE))
    return sorted(found, key=lambda each: each.name)


def count_positions(network: Any) -> None:
    """Before it is built: a RoBERTa counts positions from its padding token, which transformers 4.57 takes for token 1
    in TensorFlow."""
    if network.config.model_type == "roberta":
        network.roberta.embeddings.padding_idx = network.config.pad_token_id


def _from_folder(
    path: str, parameters: list[Parameter], values: Mapping[str, Any], classifies: bool
) -> dict[str, Array]:
    """What a model folder has of the parameters. Only a classifier's head may be absent, and counts as absent where the
    labels differ."""
    wanted = {each.name: each.shape for each in parameters}
    prefix = f"{values['model_type']}."
    found = {}
    for raw, value in _tensors(model_folder(path)):
        name = raw.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        name = name if name in wanted else prefix + name  # an encoder alone has no prefix
        if wanted.get(name) == value.shape:
            found[name] = value
    absent = sorted(name for name in wanted.keys() - found.keys() if not (classifies and name.startswith(HEAD)))
    if absent:
        raise BadInput(f"model.path {path} lacks {len(absent)} of the model's weights: {', '.join(absent[:5])}")
    if classifies and read_labels(read_config(path)) != read_labels(values):
        found = {name: value for name, value in found.items() if not name.startswith("classifier.")}
    return found


def _tensors(path: str) -> Iterator[tuple[str, Array]]:
    """All tensors of a model folder as fp32. Raises BadInput."""
    names = [WEIGHTS]
    if storage.stat(storage.join(path, WEIGHTS)) is None:
        index = storage.join(path, f"{WEIGHTS}.index.json")
        if storage.stat(index) is None:
            raise BadInput(
                f"model.path {path} has no {WEIGHTS}; write one with save_pretrained(..., safe_serialization=True)"
            )
        names = sorted(set(json.loads(storage.read(index))["weight_map"].values()))
    for name in names:
        url = storage.join(path, name)
        try:
            decoded = decode(storage.read(url))
        except Damaged as error:
            raise BadInput(f"model.path: {url}: {error}") from None
        for key, (info, data) in decoded.items():
            if info.dtype in _DTYPES:
                raw = np.frombuffer(data, _DTYPES[info.dtype]).reshape(info.shape)
                # A bfloat16 is the upper half of a float32.
                yield (
                    key,
                    (raw.astype(np.uint32) << 16).view(np.float32) if info.dtype == "BF16" else raw.astype(np.float32),
                )


def _stateless_dropout(network: Any, noise: Noise) -> None:
    """Makes what a dropout layer drops a function of `noise.seed` and the layer's place. Keras' own generators count
    calls: a resumed run would differ."""
    layers = [each for each in network.submodules if isinstance(each, tf.keras.layers.Dropout)]
    for place, layer in enumerate(sorted(layers, key=lambda each: _number(each.name))):
        layer.call = _dropper(layer.rate, place, noise)


def _number(name: str) -> int:
    """Keras numbers layers in the order in which they are made, on from the models before in the process: dropout,
    dropout_1, ..."""
    return int(name.rpartition("_")[2]) if "_" in name else 0


def _dropper(rate: float, place: int, noise: Noise) -> Callable[..., Any]:
    def call(inputs: Any, training: bool | None = None) -> Any:
        if not training or not rate:
            return inputs
        seed = tf.random.experimental.stateless_fold_in(noise.seed, place)
        return tf.nn.experimental.stateless_dropout(inputs, rate, seed, rng_alg="philox")

    return call


def _mlm(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, None]:
    """(3,): weighted loss, weights, weighted hits (protocol.SUMS), over these rows. The head sees the masked positions
    only."""
    ids = batch["input_ids"]  # (rows, sequence)
    body = getattr(network, network.base_model_prefix)
    hidden = body(input_ids=ids, attention_mask=tf.ones_like(ids), training=training)[0]  # (rows, sequence, width)
    head = network.mlm if hasattr(network, "mlm") else network.lm_head
    logits = head(tf.gather(hidden, batch["positions"], batch_dims=1))  # (rows, predictions, vocabulary)
    labels = tf.reshape(tf.maximum(batch["labels"], 0), [-1])  # (rows * predictions,)
    return _totals(tf.reshape(logits, [-1, logits.shape[-1]]), labels, tf.reshape(batch["weights"], [-1])), None


def _classification(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """The same over rows, and (labels, labels): weights of the rows of each class (first axis) that were taken for each
    (second axis)."""
    logits = network(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], training=training
    ).logits  # (rows, labels)
    labels, weights = batch["labels"], batch["weights"]  # (rows,)
    classes = logits.shape[-1]
    true = tf.one_hot(labels, classes) * weights[:, None]  # (rows, labels)
    predicted = tf.one_hot(tf.argmax(logits, -1), classes)  # (rows, labels)
    return _totals(logits, labels, weights), tf.reduce_sum(true[:, :, None] * predicted[:, None, :], 0)


def _totals(logits: Any, labels: Any, weights: Any) -> Any:
    """(3,) from (predictions, classes), (predictions,) and (predictions,)."""
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    hits = tf.cast(tf.argmax(logits, -1, output_type=labels.dtype) == labels, tf.float32)
    return tf.stack([tf.reduce_sum(losses * weights), tf.reduce_sum(weights), tf.reduce_sum(hits * weights)])


# For each task a function that gives the sums (protocol.SUMS), and what else an evaluation counts, over the rows it is
# given.
SUMS_OF: dict[str, Sums] = {"mlm": _mlm, "classification": _classification}
