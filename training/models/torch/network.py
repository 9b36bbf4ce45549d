"""Networks built by name or read from a folder.

Model code is Hugging Face's. Its dropouts and self-attention are replaced by those of `dropout.py` and `attention.py`:
the same function, up to which elements are dropped, in less memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from training.config import Model, Remat
from training.errors import BadInput, TrainError, is_out_of_memory
from training.models.families import BERT_LIKE, FAMILIES, MASKED_LM_HEADS, dropout_rates
from training.models.hugging_face import (
    ModelRequirements,
    build_model_config,
    check_capacity,
    local_copy,
    read_config,
    read_labels,
)
from training.models.initial import initial_weights
from training.models.torch.attention import Barrier, SelfAttention, recompute
from training.models.torch.dropout import Dropout, DropoutNoise
from training.registry import Head


def build(model: Model, needs: ModelRequirements, *, dropout: float | None, seed: int) -> torch.nn.Module:
    """Returns a network with the task's head, in training mode on the CPU. The same seed gives the same weights on
    every host. Raises BadInput if model.path can't be trained, lacks weights, or is too small for the data."""
    values = build_model_config(
        model, vocabulary=needs.vocabulary, pad=needs.pad, dropout=dropout, head=needs.head, labels=needs.labels
    )
    if model.path is None:
        network = _fresh(values, seed)
    elif not needs.head.is_fresh:
        network = _from_folder(model.path, needs.head, dropout)
    else:
        network = _with_fresh_head(model.path, values, dropout, seed)
    check_capacity(network.config, needs)
    if model.path is not None and network.config.model_type not in BERT_LIKE:
        _try_out(network, model.path, needs)
    network.train()
    return network


def patch_modules(
    network: Any,
    remat: Remat | None,
    *,
    default: Remat,
    barrier: Barrier,
    constants: Callable[[], AbstractContextManager[Any]],
) -> DropoutNoise | None:
    """Replaces dropout and self-attention in a network of BERT's or RoBERTa's family by those of this folder.

    Args:
        network: is changed, unless it is of another family.
        remat: train.remat, what is computed a second time in the backward pass.
        default: the same if the file does not say.
        barrier: the runtime's, for `attention.recompute`.
        constants: the runtime's, for `dropout.DropoutNoise`.

    Returns:
        The random numbers that the dropouts draw from; None for another family.

    Raises:
        BadInput: remat is given for another family.
    """
    config = network.config
    if (
        config.model_type not in BERT_LIKE
        or config.is_decoder
        or getattr(config, "position_embedding_type", "absolute") != "absolute"
    ):
        if remat in (None, "none"):
            return None
        raise BadInput(
            f"train.remat: {remat} is for encoders of BERT and RoBERTa, and model.path is of type "
            f"{config.model_type}: remove it"
        )
    remat = remat or default
    # A row's matrices are (positions, width), and for each head (positions, positions).
    noise = DropoutNoise(
        max(config.num_attention_heads * config.max_position_embeddings, config.hidden_size), constants
    )
    dropouts = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Dropout)]
    for place, name in enumerate(dropouts):
        network.set_submodule(name, Dropout(network.get_submodule(name).p, place, noise))
    for layer in network.base_model.encoder.layer:
        layer.attention.self = SelfAttention(
            layer.attention.self,
            layer.attention.self.dropout,
            recompute_behind=barrier if remat == "attention" else None,
        )
        if remat == "layers":
            # Hugging Face's own hook for this; it gives the layer's call with its keywords, and its positional
            # arguments.
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, _recompute_layer(layer, barrier)
    return noise


def _recompute_layer(layer: Any, barrier: Barrier) -> Callable[..., Any]:
    """Returns the hook by which a layer keeps only its inputs and is computed again in the backward pass."""

    def call(function: Callable[..., Any], hidden: Tensor, mask: Tensor, *others: Any) -> Any:
        parameters = tuple(layer.parameters())
        return (recompute(lambda *parts: function(*parts, *others)[0], (hidden, mask), barrier, parameters),)

    return call


def _fresh(values: dict[str, Any], seed: int) -> Any:
    """Returns the network named in `architectures`, with the weights that `seed` gives."""
    from transformers.modeling_utils import no_init_weights

    networks, config_class = _classes(values["model_type"])
    with no_init_weights():  # transformers' own would take seconds, and all are given here
        network = getattr(networks, values["architectures"][0])(config_class(**values, attn_implementation="eager"))
    network.tie_weights()
    about = {
        "deviation": network.config.initializer_range,
        "model_type": values["model_type"],
        "pad": network.config.pad_token_id,
    }
    parameters = dict(network.named_parameters())
    weights = initial_weights([(name, tuple(value.shape)) for name, value in parameters.items()], seed=seed, **about)
    with torch.no_grad():
        for value, weight in zip(parameters.values(), weights, strict=True):
            value.copy_(torch.from_numpy(weight))
    return network


def _classes(model_type: str) -> tuple[Any, Any]:
    """Returns the module that has a family's networks, and the class of its configuration."""
    if model_type == "roberta":
        from transformers.models.roberta import modeling_roberta as networks
        from transformers.models.roberta.configuration_roberta import RobertaConfig as Config
    elif model_type == "bert":
        from transformers.models.bert import modeling_bert as networks
        from transformers.models.bert.configuration_bert import BertConfig as Config
    else:
        import transformers as networks

        Config = getattr(networks, f"{FAMILIES[model_type].prefix}Config")
    return networks, Config


def _from_folder(path: str, head: Head, dropout: float | None) -> Any:
    """Returns a model folder's network and weights. Raises BadInput for a missing weight: it would be random."""
    import transformers

    with _one_line_errors(path), local_copy(path) as folder:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config.update(_training_values(config, dropout))
    network, absent = _load(path, getattr(transformers, f"AutoModel{head.network}"), config=config)
    _refuse(path, absent)
    return network


def _with_fresh_head(path: str, values: dict[str, Any], dropout: float | None, seed: int) -> Any:
    """Returns a classifier with an encoder's weights from a folder. Its head is fresh, unless the folder is a
    classifier of the same labels."""
    with _one_line_errors(path):
        config = _classes(values["model_type"])[1](**values)
        network = _fresh({**values, **_training_values(config, dropout)}, seed)
    loaded, absent = _load(path, type(network), config=network.config, ignore_mismatched_sizes=True)
    fresh_parameters = FAMILIES[values["model_type"]].fresh_parameters
    _refuse(path, {name for name in absent if not name.startswith(fresh_parameters)})
    fresh = tuple(absent) if read_labels(read_config(path)) == read_labels(values) else (*absent, "classifier.")
    weights = {name: value for name, value in loaded.state_dict().items() if not name.startswith(fresh)}
    network.load_state_dict(weights, strict=False)
    return network


def _training_values(config: Any, dropout: float | None) -> dict[str, Any]:
    """Returns the values that training changes in a network's configuration."""
    values = config.to_dict()
    # ModernBERT would compile itself with torch.compile; here the step is compiled as a whole.
    return {**dropout_rates(values, dropout), **({"reference_compile": False} if "reference_compile" in values else {})}


@contextlib.contextmanager
def _one_line_errors(path: str) -> Iterator[None]:
    """Turns an error of transformers about a model folder into a BadInput of one line."""
    try:
        yield
    except (TrainError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), "")[:300]
        raise BadInput(
            f"model.path {path} can't be trained here: {type(error).__name__}: {reason}; give a model of one of the "
            f"families {', '.join(FAMILIES)}, as save_pretrained writes it"
        ) from None


def _try_out(network: Any, path: str, needs: ModelRequirements) -> None:
    """Runs a network of an unknown family on one short row. Raises BadInput if that fails, or if the network applies
    its masked-LM head otherwise than `apply_head`: then every loss would be wrong."""
    ids = torch.arange(min(16, needs.sequence_length)).unsqueeze(0)  # (1, tokens)
    mask = torch.ones_like(ids)
    network.eval()
    with _one_line_errors(path), torch.no_grad():
        theirs = network(input_ids=ids, attention_mask=mask).logits
        if needs.head.is_fresh:
            return
        ours = apply_head(network, network.base_model(input_ids=ids, attention_mask=mask)[0])
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"the masked-LM head of {type(network).__name__} is not a function of the last layer alone"
            )


def apply_head(network: Any, hidden: Tensor) -> Tensor:
    """Returns logits (..., vocabulary): the masked-LM head of a network applied to hidden states (..., width).

    Raises BadInput for a head that is built like none of `MASKED_LM_HEADS`."""
    for names in MASKED_LM_HEADS:
        if all(hasattr(network, name) for name in names):
            for name in names:
                hidden = getattr(network, name)(hidden)
            return hidden
    raise BadInput(f"the masked-LM head of {type(network).__name__} is built like none that this program knows")


def _load(path: str, network: Any, **options: Any) -> tuple[Any, set[str]]:
    """Returns a network with a folder's weights, and the names of the weights that the folder lacks or has in another
    shape."""
    with _one_line_errors(path), local_copy(path) as folder:
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
    """Raises BadInput if `absent` names any weights."""
    if absent:
        raise BadInput(f"model.path {path} lacks {len(absent)} of the model's weights: {', '.join(sorted(absent)[:5])}")
