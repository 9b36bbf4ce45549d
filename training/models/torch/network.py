"""Networks built by name or read from a folder, without weights for preflight, or as transformers' pipelines.

Model code is Hugging Face's. Its dropouts and self-attention are replaced by those of `dropout.py` and `attention.py`:
the same function, up to which elements are dropped, in less memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from training.config import Model, Remat
from training.errors import BadInput, TrainError, is_out_of_memory
from training.models.hugging_face import (
    BERT_LIKE,
    FAMILIES,
    MASKED_LM_HEADS,
    PATCHED,
    PLAIN_HEADS,
    ModelRequirements,
    build_model_config,
    check_capacity,
    dropout_rates,
    is_of_head,
    read_config,
    read_labels,
)
from training.models.initial import initial_weights
from training.models.torch.attention import Barrier, Linear, SelfAttention, recompute
from training.models.torch.dropout import Dropout, DropoutNoise
from training.registry import CAUSAL_LM, Head
from training.storage.hub import local_copy


def build(model: Model, needs: ModelRequirements, *, dropout: float | None, seed: int) -> torch.nn.Module:
    """Returns a network with the task's head, in training mode on the CPU; `dropout` None keeps the model's rates, 0.1
    for a named model. The same seed gives the same weights on every host. May download model.path, and set torch's
    seed. Raises BadInput if the model can't be trained, lacks weights, or is too small for the data; StorageError."""
    values = build_model_config(model, needs, dropout)
    place = "model.config" if model.path is None else f"model.path {model.path}"
    if model.config is not None:
        network = _from_config(place, values, dropout, seed)
    elif model.path is None:
        network = _fresh(values, dropout, seed)
    elif not needs.head.is_fresh:
        network = _from_folder(model.path, values, needs.head, dropout)
    else:
        network = _with_fresh_head(model.path, values, dropout, seed)
    check_capacity(network.config, needs)
    if network.config.model_type not in BERT_LIKE or needs.head == CAUSAL_LM:
        _try_out(network, place, needs)
    return network.train()


def patch_modules(network: Any, remat: Remat | None, *, default: Remat, barrier: Barrier) -> DropoutNoise | None:
    """Replaces dropout and self-attention in an encoder of a family in `PATCHED` by those of this folder, and returns
    the random numbers that the dropouts draw from. In another network, for which it returns None, it changes only the
    layers, for remat "layers". A decoder with a plain head gets the attribute `has_plain_head`: its task may apply
    `lm_head` to parts of a row. `remat`: train.remat, what is computed a second time in the backward pass; None:
    `default` for an encoder, nothing for others. Raises BadInput if remat is "attention" for another network, or
    "layers" and its layers have no hook for that."""
    config = network.config
    if config.model_type in PLAIN_HEADS and hasattr(network, "lm_head"):
        network.has_plain_head = True
    if (
        config.model_type not in PATCHED
        or config.is_decoder
        or getattr(config, "position_embedding_type", "absolute") != "absolute"
    ):
        if remat in (None, "none"):
            return None
        if remat == "layers" and _recompute_layers(network, barrier):
            return None
        raise BadInput(
            f"train.remat: {remat} is for encoders like BERT, and the model is of type {config.model_type}: remove it"
        )
    remat = remat or default
    # A row's matrices are (positions, width), and for each head (positions, positions).
    noise = DropoutNoise(max(config.num_attention_heads * config.max_position_embeddings, config.hidden_size))
    dropouts = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Dropout)]
    for place, name in enumerate(dropouts):
        network.set_submodule(name, Dropout(network.get_submodule(name).p, place, noise))
    for layer in network.base_model.encoder.layer:
        theirs, behind = layer.attention.self, barrier if remat == "attention" else None
        layer.attention.self = SelfAttention(theirs, theirs.dropout, recompute_behind=behind)
        for linear in (theirs.query, theirs.key, theirs.value, layer.attention.output.dense):
            linear.__class__ = Linear
    if remat == "layers":
        _recompute_layers(network, barrier)
    return noise


def slow_parts(network: Any, *, is_fast: bool) -> str | None:
    """Returns a line that says which of transformers' own modules in a network cost much; None if none does.
    `is_fast`: its attention keeps no scores."""
    parts = [] if is_fast else ["attention keeps rows x heads x length x length scores for the backward pass"]
    if getattr(network, "applies_whole_head", False):
        parts.append("the masked-LM head is computed at all positions, about 7 times the work")
    if not parts:
        return None
    return f"a {network.config.model_type} model is computed by transformers' own modules: {'; '.join(parts)}"


def _recompute_layers(network: Any, barrier: Barrier) -> bool:
    """Makes every layer that offers transformers' hook for it compute again what the backward pass needs. Returns
    whether there is one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, _recompute_layer(layer, barrier)
    return bool(layers)


def _recompute_layer(layer: Any, barrier: Barrier) -> Callable[..., Any]:
    """Returns what transformers' hook calls instead of a layer: it keeps only the input, the first argument, and
    computes the rest again in the backward pass, behind `barrier`. Of a tuple it returns only the first element, in a
    tuple."""

    def call(function: Callable[..., Any], hidden: Tensor, *others: Any) -> Any:
        is_tuple: list[bool] = []

        def forward(hidden: Tensor) -> Tensor:
            result = function(hidden, *others)
            is_tuple[:] = [isinstance(result, tuple)]
            return result[0] if is_tuple[0] else result

        trained = tuple(parameter for parameter in layer.parameters() if parameter.requires_grad)
        result = recompute(forward, (hidden,), barrier, trained)
        return (result,) if is_tuple[0] else result

    return call


def _fresh(values: dict[str, Any], dropout: float | None, seed: int) -> Any:
    """Returns the network named in `architectures`, with the weights that training.models.initial makes of `seed`."""
    from transformers.modeling_utils import no_init_weights

    with no_init_weights():  # transformers' own would take seconds, and all are given here
        network = _untrained(_training_config(values, dropout))
    network.tie_weights()
    shapes = [(name, tuple(value.shape)) for name, value in network.named_parameters()]
    pad, deviation = network.config.pad_token_id, network.config.initializer_range
    weights = initial_weights(shapes, seed=seed, deviation=deviation, model_type=values["model_type"], pad=pad)
    with torch.no_grad():
        for value, weight in zip(network.parameters(), weights, strict=True):
            value.copy_(torch.from_numpy(weight))
    return network


def _from_config(place: str, values: dict[str, Any], dropout: float | None, seed: int) -> Any:
    """Returns the network named in `architectures`, with transformers' own random weights of this seed, which it sets
    for torch. Raises BadInput, which begins with `place`, if transformers can't make it."""
    with _one_line_errors(place):
        config = _training_config(values, dropout)
        torch.manual_seed(seed)
        return _untrained(config)


def _untrained(config: Any) -> Any:
    """Returns the network named in `architectures`, in float32. Raises ValueError if transformers has none."""
    import transformers

    [name, *_] = config.architectures
    network = getattr(transformers, name, None)
    if network is None:
        raise ValueError(f"transformers has no network {name}")
    return network._from_config(config, attn_implementation="eager", dtype=torch.float32)


def _training_config(values: Mapping[str, Any], dropout: float | None) -> Any:
    """Returns transformers' configuration of these values of config.json, for training: with dropout's rates (None:
    its own), without a cache and without compilation by the network. Raises transformers' errors."""
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    own = config.to_dict()
    # ModernBERT would compile itself with torch.compile; here the step is compiled as a whole.
    unwanted = {name: False for name in ("reference_compile", "use_cache") if name in own}
    # Classifiers of decoders make their base model in the configuration's own type.
    config.update({**dropout_rates(own, dropout), **unwanted, "dtype": torch.float32})
    return config


def _from_folder(path: str, values: dict[str, Any], head: Head, dropout: float | None) -> Any:
    """Returns a model folder's network with `head`, and its weights; `values`: of its config.json. Raises BadInput if
    transformers can't load it, or for a missing weight: it would be random. StorageError."""
    import transformers

    with _one_line_errors(f"model.path {path}"):
        config = _training_config(values, dropout)
    network, absent = _load(path, getattr(transformers, f"AutoModel{head.network}"), config=config)
    _refuse(path, absent)
    return network


def _with_fresh_head(path: str, values: dict[str, Any], dropout: float | None, seed: int) -> Any:
    """Returns a classifier with the weights of a folder's base model. Its head is fresh, unless the folder is a
    classifier of the same labels. Sets torch's seed for a model type that is not in FAMILIES. Raises BadInput if
    another weight is missing, or transformers can't load it; StorageError."""
    family, place = FAMILIES.get(values["model_type"]), f"model.path {path}"
    if family is None:
        network = _from_config(place, values, dropout, seed)
        base = network.base_model_prefix
        head = tuple(name for name in network.state_dict() if is_of_head(name, base))
        changed: tuple[str, ...] = tuple(name for name in head if not name.startswith(f"{base}."))
    else:
        with _one_line_errors(place):
            network = _fresh(values, dropout, seed)
        head, changed = family.fresh_parameters, ("classifier.",)
    loaded, absent = _load(path, type(network), config=network.config, ignore_mismatched_sizes=True)
    _refuse(path, {name for name in absent if not name.startswith(head)})
    fresh = tuple(absent) if read_labels(read_config(path)) == read_labels(values) else (*absent, *changed)
    weights = {name: value for name, value in loaded.state_dict().items() if not name.startswith(fresh)}
    network.load_state_dict(weights, strict=False)
    return network


@contextlib.contextmanager
def _one_line_errors(place: str) -> Iterator[None]:
    """Turns errors in the block, but TrainError and of memory, into a BadInput of one line that begins with `place`."""
    try:
        yield
    except (TrainError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), "")[:300]
        raise BadInput(
            f"{place} can't be trained here: {type(error).__name__}: {reason}; give a model of transformers that has "
            "the task's head, as save_pretrained writes it"
        ) from None


def _try_out(network: Any, place: str, needs: ModelRequirements) -> None:
    """Runs a decoder, or a network of an unknown family, on one short row, and leaves it in evaluation mode. Sets
    `applies_whole_head` of a masked-LM network: whether `apply_head` fails or gives another result than its own head.
    Raises BadInput, which begins with `place`, if it fails, or a decoder mixes documents of a packed row."""
    ids = torch.arange(min(16, needs.sequence_length)).unsqueeze(0)  # (1, tokens)
    mask = torch.ones_like(ids)
    network.eval()
    with _one_line_errors(place), torch.no_grad():
        if needs.head == CAUSAL_LM:
            check_borders(network, ids)
            return
        theirs = network(input_ids=ids, attention_mask=mask).logits
        if needs.head.is_fresh:
            return
        network.applies_whole_head = True
        with contextlib.suppress(BadInput, RuntimeError):
            ours = apply_head(network, network.base_model(input_ids=ids, attention_mask=mask)[0])
            is_same = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
            network.applies_whole_head = not is_same


def check_borders(network: Any, ids: Tensor) -> None:
    """Raises ValueError unless positions that begin again divide a row, (1, tokens), into documents: two documents
    side by side must give what each gives alone, and a document's beginning what it gives without its end. A row needs
    4 tokens. The caller puts the network in evaluation mode and switches gradients off."""
    first = ids.shape[1] // 2
    places = torch.cat([torch.arange(first), torch.arange(ids.shape[1] - first)]).unsqueeze(0)
    together = network(input_ids=ids, position_ids=places, use_cache=False).logits[0]
    for start, seen in ((0, first - 1), (first, ids.shape[1])):
        alone = network(input_ids=ids[:, start:seen], use_cache=False).logits[0]
        # Relative to the largest logit: what fp32 loses is 1e-6 of it, and a neighbour's part in random weights 1e-3.
        if (together[start:seen] - alone).abs().max() > 1e-4 * alone.abs().max():
            raise ValueError(
                f"{type(network).__name__} lets a token see later ones, or another document of its packed row: "
                "it takes no causal mask with borders from positions that begin again"
            )


def apply_head(network: Any, hidden: Tensor) -> Tensor:
    """Returns logits (..., vocabulary): the masked-LM head of a network applied to hidden states (..., width). Raises
    BadInput for a head that is built like none of `MASKED_LM_HEADS`."""
    for names in MASKED_LM_HEADS:
        if all(hasattr(network, name) for name in names):
            for name in names:
                hidden = getattr(network, name)(hidden)
            return hidden
    raise BadInput(f"the masked-LM head of {type(network).__name__} is built like none that this program knows")


def _load(path: str, network: Any, **options: Any) -> tuple[Any, set[str]]:
    """Returns a network of class `network` with a folder's weights, in float32, and the names of those that it lacks
    or, with `ignore_mismatched_sizes`, has in another shape. `options` are from_pretrained's. Raises BadInput,
    StorageError."""
    with _one_line_errors(f"model.path {path}"), local_copy(path) as folder:
        loaded, report = network.from_pretrained(
            folder,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            **options,
        )
    return loaded, {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}


def _refuse(path: str, absent: set[str]) -> None:
    """Raises BadInput, which names the first five, if weights are absent."""
    if absent:
        raise BadInput(f"model.path {path} lacks {len(absent)} of the model's weights: {', '.join(sorted(absent)[:5])}")


def build_empty(model: Model, needs: ModelRequirements, *, dropout: float | None) -> Any:
    """Returns the network that `build` returns, but with its parameters on the meta device; None for a network whose
    program depends on what its weights give (a masked-LM head of a family that is tried out). Raises BadInput if
    model.path can't be read, or is too small for the data; StorageError."""
    import transformers
    from transformers.modeling_utils import init_empty_weights, no_init_weights

    values = build_model_config(model, needs, dropout)
    if needs.head.network == "ForMaskedLM" and values["model_type"] not in BERT_LIKE:
        return None
    config, automatic = _training_config(values, dropout), getattr(transformers, f"AutoModel{needs.head.network}")
    with no_init_weights(), init_empty_weights():
        network = automatic.from_config(config, attn_implementation="eager", dtype=torch.float32)
    network.tie_weights()
    check_capacity(network.config, needs)
    return network.train()


def move(network: Any, device: Any, placeholder: Callable[[Any], Any] = torch.empty) -> None:
    """Moves a network to the device, with tied weights still tied: runtimes of TPUs make two of a tied weight.
    `placeholder`: makes a tensor from the shape of a parameter without values (on the meta device), on any device.
    transformers' `tie_weights` would tie them too, but pads the bias of some heads: an operation that waits for the
    first step, whose program is then another one than that of the second."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        if (parameter := network.get_parameter(first)).is_meta:
            parameter = torch.nn.Parameter(placeholder(parameter.shape), parameter.requires_grad)
            for name in (first, *others):
                _set_parameter(network, name, parameter)
    network.to(device)
    for first, *others in names.values():
        for other in others:
            _set_parameter(network, other, network.get_parameter(first))


def _set_parameter(network: Any, name: str, parameter: Any) -> None:
    """Replaces the parameter with this dotted name in a network."""
    module, _, attribute = name.rpartition(".")
    setattr(network.get_submodule(module), attribute, parameter)


def open_pipeline(name: str, folder: str) -> Any:
    """Returns `transformers.pipeline(name)` over a local model folder, on the CPU."""
    from transformers import pipeline

    return pipeline(name, model=folder, framework="pt", device="cpu")
