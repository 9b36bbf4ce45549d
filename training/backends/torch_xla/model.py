"""Networks for the torch backends: built by name or read from a folder.

Model code is Hugging Face's; only the classes in use are imported, because importing all of transformers takes seconds.
Its dropouts and self-attention are replaced by those of `dropout.py` and `attention.py`: the same function, up to which
elements are dropped, in less memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from training.backends.torch_xla.attention import SelfAttention, recompute
from training.backends.torch_xla.dropout import Dropout, Noise, noise_for
from training.config import Model, Remat
from training.errors import BadInput
from training.models.hugging_face import (
    FAMILIES,
    FRESH_PARAMETERS,
    ModelRequirements,
    build_model_config,
    check_capacity,
    local_copy,
    read_config,
    read_labels,
)
from training.models.initial import initial_weight
from training.registry import Head


def build(model: Model, needs: ModelRequirements, *, dropout: float, seed: int) -> torch.nn.Module:
    """A network with the task's head, in training mode on the CPU. The same seed gives the same weights on every
    host. Raises BadInput."""
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
    network.train()
    return network


def patch_modules(network: Any, remat: Remat | None, *, otherwise: Remat) -> Noise | None:
    """Replaces dropout and self-attention in a network of BERT's or RoBERTa's family by those of this folder.

    Args:
        network: is changed; one of another family stays as it is.
        remat: train.remat, what is computed a second time in the backward pass.
        otherwise: the same where the file does not say.

    Returns:
        What the dropouts draw from; None for another family.

    Raises:
        BadInput: remat is given for another family.
    """
    config = network.config
    if (
        config.model_type not in FAMILIES
        or config.is_decoder
        or getattr(config, "position_embedding_type", "absolute") != "absolute"
    ):
        if remat in (None, "none"):
            return None
        raise BadInput(
            f"train.remat: {remat} is for encoders of BERT and RoBERTa, and model.path is of type "
            f"{config.model_type}: remove it"
        )
    remat = remat or otherwise
    noise = noise_for(network)
    dropouts = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Dropout)]
    for place, name in enumerate(dropouts):
        network.set_submodule(name, Dropout(network.get_submodule(name).p, place, noise))
    for layer in network.base_model.encoder.layer:
        layer.attention.self = SelfAttention(
            layer.attention.self, layer.attention.self.dropout, recomputes=remat == "attention"
        )
        if remat == "layers":
            # Hugging Face's own hook for this; it gives the layer's call with its keywords, and its positional
            # arguments.
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, _recompute_layer(layer)
    return noise


def _recompute_layer(layer: Any) -> Callable[..., Any]:
    def call(function: Callable[..., Any], hidden: Tensor, mask: Tensor, *others: Any) -> Any:
        return (recompute(lambda *parts: function(*parts, *others)[0], (hidden, mask), tuple(layer.parameters())),)

    return call


def _fresh(values: dict[str, Any], seed: int) -> Any:
    """The network named in `architectures`."""
    if values["model_type"] == "roberta":
        from transformers.models.roberta import modeling_roberta as networks
        from transformers.models.roberta.configuration_roberta import RobertaConfig as Config
    else:
        from transformers.models.bert import modeling_bert as networks
        from transformers.models.bert.configuration_bert import BertConfig as Config

    network = getattr(networks, values["architectures"][0])(Config(**values, attn_implementation="eager"))
    about = {
        "deviation": network.config.initializer_range,
        "model_type": values["model_type"],
        "pad": network.config.pad_token_id,
    }
    with torch.no_grad():
        for name, value in network.named_parameters():
            value.copy_(torch.from_numpy(initial_weight(name, tuple(value.shape), seed=seed, **about)))
    return network


def _from_folder(path: str, head: Head, dropout: float) -> Any:
    """A model folder's network and weights. A weight that the folder lacks is refused: it would be random."""
    import transformers

    network, absent = _load(
        path,
        getattr(transformers, f"AutoModel{head.network}"),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    _refuse(path, absent)
    return network


def _with_fresh_head(path: str, values: dict[str, Any], dropout: float, seed: int) -> Any:
    """A classifier with an encoder's weights from a folder. Its head is fresh, unless the folder is a classifier of the
    same labels."""
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "classifier_dropout": dropout}
    network = _fresh({**values, **dropouts}, seed)
    loaded, absent = _load(path, type(network), config=network.config, ignore_mismatched_sizes=True)
    _refuse(path, {name for name in absent if not name.startswith(FRESH_PARAMETERS)})
    fresh = tuple(absent) if read_labels(read_config(path)) == read_labels(values) else (*absent, "classifier.")
    weights = {name: value for name, value in loaded.state_dict().items() if not name.startswith(fresh)}
    network.load_state_dict(weights, strict=False)
    return network


def _load(path: str, network: Any, **options: Any) -> tuple[Any, set[str]]:
    """A network with a folder's weights, and the names of those that the folder does not have, or not in the right
    shape."""
    try:
        with local_copy(path) as folder:
            loaded, report = network.from_pretrained(
                folder,
                attn_implementation="eager",
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=True,
                **options,
            )
    except (OSError, ValueError) as error:
        raise BadInput(f"model.path {path}: {error}") from None
    return loaded, {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}


def _refuse(path: str, absent: set[str]) -> None:
    if absent:
        raise BadInput(f"model.path {path} lacks {len(absent)} of the model's weights: {', '.join(sorted(absent)[:5])}")
