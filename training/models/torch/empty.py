"""Networks without weights, for preflight: their parameters have shapes only, so that a model may be larger than this
machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from training.config import Model
from training.models.families import BERT_LIKE, dropout_rates
from training.models.hugging_face import ModelRequirements, build_model_config, check_capacity


def build_empty(model: Model, needs: ModelRequirements, *, dropout: float | None) -> Any:
    """Returns the network that `network.build` returns, but with its parameters on the meta device; None for a network
    whose program depends on what its weights give (a masked-LM head of a family that is tried out). Raises BadInput if
    model.path can't be read, or is too small for the data."""
    import transformers
    from transformers.modeling_utils import no_init_weights

    values: dict[str, Any] = build_model_config(
        model, vocabulary=needs.vocabulary, pad=needs.pad, dropout=dropout, head=needs.head, labels=needs.labels
    )
    if needs.head.network == "ForMaskedLM" and values["model_type"] not in BERT_LIKE:
        return None
    unwanted: dict[str, Any] = {name: False for name in ("reference_compile", "use_cache") if name in values}
    config = transformers.AutoConfig.for_model(**{**values, **unwanted})
    config.update(dropout_rates(config.to_dict(), dropout))
    with no_init_weights(), parameters_without_values():
        network = getattr(transformers, f"AutoModel{needs.head.network}").from_config(
            config, attn_implementation="eager"
        )
    network.tie_weights()
    check_capacity(network.config, needs)
    if network.config.pad_token_id is None and needs.head.is_fresh:
        network.config.pad_token_id = needs.pad
    return network.train()


@contextmanager
def parameters_without_values() -> Iterator[None]:
    """Puts parameters that modules register in this block on the meta device. Buffers keep their values."""
    register = torch.nn.Module.register_parameter

    def register_empty(module: Any, name: str, parameter: Any) -> None:
        empty = None if parameter is None else torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, empty)

    torch.nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register
