"""Builds networks for the TensorFlow backend: transformers' Keras 2 models, with initial weights and dropout; and opens
trained ones. Needs no torch.

Checkpoints and model folders have parameters under PyTorch's names and in PyTorch's shapes, whichever backend wrote
them. In TensorFlow a dense layer's kernel is the transpose of PyTorch's weight; other shapes are the same.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import transformers

from training import storage
from training.checkpoint.tensors import Damaged, decode
from training.config import TrainerConfig
from training.errors import BadInput
from training.models.hugging_face import (
    FAMILIES,
    WEIGHTS,
    ModelRequirements,
    build_model_config,
    check_capacity,
    dropout_rates,
    read_config,
    read_labels,
    require_family,
)
from training.models.initial import initial_weights
from training.registry import TASKS, Head
from training.storage.hub import model_folder

_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16}

Array = npt.NDArray[np.float32]
# Sets variables to arrays: training.backends.tensorflow.replicas.Replicas.assign.
Assign = Callable[[Iterable[tuple[Any, Array]]], None]


@dataclass(frozen=True)
class Parameter:
    """A variable under its PyTorch name. Arrays to and from outside have PyTorch's shape."""

    name: str
    variable: Any
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape in PyTorch's layout."""
        shape = tuple(self.variable.shape)
        return shape[::-1] if self.transposed else shape

    def read(self, variable: Any) -> Array:
        """Returns the value of this variable, or of another one of its shape, in PyTorch's layout."""
        value: Array = variable.numpy()
        return np.ascontiguousarray(value.T if self.transposed else value)

    def array_of(self, value: Array) -> Array:
        """Returns `value`, which is in PyTorch's layout, in the variable's layout."""
        return value.T if self.transposed else value


@dataclass
class KerasNetwork:
    """A Keras model with its parameters, sorted by name."""

    model: Any
    parameters: list[Parameter]
    seed: Any = None  # of dropout while a step is traced: a tensor, (2,) int32, so that one program serves all steps


def build(config: TrainerConfig, needs: ModelRequirements, assign: Assign) -> KerasNetwork:
    """Builds a network with the task's head and sets its weights by `assign`: those of `model.path` (downloads a model
    of the Hub), or fresh ones, the same on every host and in every backend. Raises BadInput if weights are absent, data
    and model do not fit, or TensorFlow does not train the model's family; StorageError."""
    model, dropout = config.model, config.train.dropout
    values = build_model_config(model, needs, dropout)
    require_family(values, model.path, needs.head, "tensorflow")
    network = _build_network(values, needs.head, dropout)
    check_capacity(network.config, needs)
    count_positions(network)
    network.build_in_name_scope()
    parameters = _list_parameters(network)
    weights = {} if model.path is None else _read_weights(model.path, parameters, values, needs.head.is_fresh)
    absent = [(parameter.name, parameter.shape) for parameter in parameters if parameter.name not in weights]
    fresh = initial_weights(
        absent,
        seed=config.seed,
        deviation=network.config.initializer_range,
        model_type=values["model_type"],
        pad=network.config.pad_token_id,
    )

    def value_of(parameter: Parameter) -> Array:
        value = weights.get(parameter.name)
        return parameter.array_of(next(fresh) if value is None else value)

    assign((parameter.variable, value_of(parameter)) for parameter in parameters)
    built = KerasNetwork(network, parameters)
    _replace_dropout(built)
    return built


def _build_network(values: dict[str, Any], head: Head, dropout: float | None) -> Any:
    """Returns transformers' Keras network of this head, without weights yet. `values`: of config.json; `dropout`
    replaces its rates unless it is None."""
    prefix = FAMILIES[values["model_type"]].prefix
    config = getattr(transformers, f"{prefix}Config")(**values)
    config.update(dropout_rates(config.to_dict(), dropout))
    return getattr(transformers, f"TF{prefix}{head.network}")(config)


def _list_parameters(network: Any) -> list[Parameter]:
    """Returns the trainable variables, sorted by their PyTorch names, with whether PyTorch's shape is the transpose."""
    from transformers.modeling_tf_pytorch_utils import TransposeType, convert_tf_weight_name_to_pt_weight_name

    parameters = []
    for variable in network.trainable_variables:
        name, transposed = convert_tf_weight_name_to_pt_weight_name(variable.name, tf_weight_shape=variable.shape)
        parameters.append(Parameter(name, variable, transposed is TransposeType.SIMPLE))
    return sorted(parameters, key=lambda parameter: parameter.name)


def count_positions(network: Any) -> None:
    """Makes a RoBERTa count positions from its padding token, which transformers 4.57 takes for token 1 in TensorFlow;
    leaves other networks as they are. Must be called before the network is built."""
    if network.config.model_type == "roberta":
        network.roberta.embeddings.padding_idx = network.config.pad_token_id


def _read_weights(
    path: str, parameters: list[Parameter], values: Mapping[str, Any], fresh_head: bool
) -> dict[str, Array]:
    """Returns the arrays of the parameters that the model `path` (a folder, URL or the Hub's name) has, without its
    classifier if `fresh_head` and its labels are others. Raises BadInput if a parameter is absent or of another shape,
    unless it is a head's and `fresh_head`; StorageError. `values`: the network's config.json."""
    wanted = {parameter.name: parameter.shape for parameter in parameters}
    prefix = f"{values['model_type']}."
    weights = {}
    for raw, value in _read_tensors(model_folder(path)):
        name = raw.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        name = name if name in wanted else prefix + name  # an encoder alone has no prefix
        if wanted.get(name) == value.shape:
            weights[name] = value
    fresh_parameters = FAMILIES[values["model_type"]].fresh_parameters
    missing = wanted.keys() - weights.keys()
    absent = sorted(name for name in missing if not (fresh_head and name.startswith(fresh_parameters)))
    if absent:
        raise BadInput(f"model.path {path} lacks {len(absent)} of the model's weights: {', '.join(absent[:5])}")
    if fresh_head and read_labels(read_config(path)) != read_labels(values):
        weights = {name: value for name, value in weights.items() if not name.startswith("classifier.")}
    return weights


def _read_tensors(path: str) -> Iterator[tuple[str, Array]]:
    """Yields the name and the fp32 array of all floating-point tensors of a model folder (local or a URL), of one file
    or several. Raises BadInput if there is no safetensors file, or one is damaged; StorageError."""
    names = [WEIGHTS]
    if storage.stat(storage.join(path, WEIGHTS)) is None:
        index = storage.join(path, f"{WEIGHTS}.index.json")
        if storage.stat(index) is None:
            raise BadInput(
                f"model.path {path} has no {WEIGHTS}; write one with save_pretrained(..., safe_serialization=True)"
            )
        try:
            names = sorted({str(name) for name in json.loads(storage.read(index))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"model.path: {index}: {type(error).__name__}: {error}") from None
    for name in names:
        url = storage.join(path, name)
        try:
            for key, (info, data) in decode(storage.read(url)).items():
                if info.dtype in _DTYPES:
                    raw = np.frombuffer(data, _DTYPES[info.dtype]).reshape(info.shape)
                    if info.dtype == "BF16":  # the upper half of a float32
                        yield key, (raw.astype(np.uint32) << 16).view(np.float32)
                    else:
                        yield key, raw.astype(np.float32)
        except (Damaged, ValueError) as error:  # ValueError: a tensor's size is not that of its shape
            raise BadInput(f"model.path: {url}: {error}") from None


def _replace_dropout(network: KerasNetwork) -> None:
    """Makes dropout a function of `network.seed` and the layer's place. Keras' own generators count calls, so that a
    resumed run would differ."""
    layers = [layer for layer in network.model.submodules if isinstance(layer, tf.keras.layers.Dropout)]
    # Keras calls them dropout, dropout_1, ... in the order in which this process made them.
    for place, layer in enumerate(sorted(layers, key=lambda layer: int(layer.name.partition("_")[2] or 0))):
        layer.call = _make_dropout(layer.rate, place, network)


def _make_dropout(rate: float, place: int, network: KerasNetwork) -> Callable[..., Any]:
    """Returns the `call` of a Keras layer that drops values in training by `network.seed` and `place`."""

    def call(inputs: Any, training: bool | None = None) -> Any:
        """Returns `inputs` as they are unless `training`; else drops by the seed that the network has at the call."""
        if not training or not rate:
            return inputs
        seed = tf.random.experimental.stateless_fold_in(network.seed, place)
        return tf.nn.experimental.stateless_dropout(inputs, rate, seed, rng_alg="philox")

    return call


def open_pipeline(name: str, folder: str) -> Any:
    """Returns `transformers.pipeline(name)`, such as "fill-mask", over a local model folder, on the CPU. Raises
    BadInput for absent or damaged weights, or a family that TensorFlow lacks. Loads the weights itself: transformers
    4.57's TFAutoModel.from_pretrained fails on a safetensors file with PyTorch's names ("'builtins.safe_open' object is
    not iterable")."""
    from transformers import AutoConfig, AutoTokenizer, pipeline
    from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model

    networks = {entry.head.pipeline: f"TFAutoModel{entry.head.network}" for entry in TASKS.values()}
    config = AutoConfig.from_pretrained(folder)
    try:
        model = getattr(transformers, networks[name]).from_config(config)
    except ValueError as error:
        why = f"{folder} is a {config.model_type} model, which TensorFlow can't open: {str(error).splitlines()[0]}"
        raise BadInput(f"{why}; run in the image of torch-xla") from None
    count_positions(model)
    ids = tf.constant([[0, 1]])
    weights = dict(_read_tensors(folder))
    _, report = load_pytorch_state_dict_in_tf2_model(
        model, weights, tf_inputs={"input_ids": ids}, allow_missing_keys=True, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise BadInput(f"{folder} lacks {len(missing)} of the model's weights: {', '.join(missing[:3])}")
    # Without dtype=None, transformers would look its default up in torch.
    return pipeline(name, model=model, tokenizer=AutoTokenizer.from_pretrained(folder), framework="tf", dtype=None)
