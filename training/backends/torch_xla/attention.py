"""Self-attention of BERT and RoBERTa for a step that needs little memory, over the weights of Hugging Face's modules;
and computing again what is not kept.

Attention computes what theirs does (scores and softmax in fp32, products in the step's precision), but keeps only
query, key and value for the backward pass: scores and probabilities, (rows, heads, sequence, sequence) each, are
computed a second time there. That is 3 % of the work of bert-large at 512 tokens, and a third of its memory (`make
benchmark NAME=preflight`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor

from training.backends.torch_xla.dropout import Dropout


class SelfAttention(torch.nn.Module):  # type: ignore[misc]  # torch is not here when types are checked
    """In place of BertSelfAttention or RobertaSelfAttention, with the same weights under the same names."""

    def __init__(self, theirs: Any, dropout: Dropout, *, recomputes: bool) -> None:
        """
        Args:
            theirs: the module of Hugging Face's.
            dropout: of the probabilities.
            recomputes: whether scores and probabilities are computed a second time in the backward pass.
        """
        super().__init__()
        self.query, self.key, self.value, self.dropout = theirs.query, theirs.key, theirs.value, dropout
        self.heads, self.recomputes = theirs.num_attention_heads, recomputes

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """(rows, sequence, width) to the same; `attention_mask` is added to scores, (rows, 1, 1, sequence)."""
        parts = (self.query(hidden_states), self.key(hidden_states), self.value(hidden_states), attention_mask)
        return (recompute(self.attend, parts) if self.recomputes else self.attend(*parts)), None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        """(rows, sequence, width) from three of that shape and the mask."""
        rows, length, width = query.shape
        query, key, value = (
            projection.view(rows, length, self.heads, -1).transpose(1, 2) for projection in (query, key, value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)).float() / math.sqrt(
            width // self.heads
        )  # (rows, heads, sequence, sequence)
        probabilities = self.dropout(torch.softmax(scores + attention_mask, -1).to(value.dtype))
        return torch.matmul(probabilities, value).transpose(1, 2).reshape(rows, length, width)


def recompute(function: Callable[..., Tensor], parts: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> Tensor:
    """function(*parts), of which nothing is kept for the backward pass but `parts`: there it is computed a second time.
    `parameters` are what else it reads that wants gradients. torch.utils.checkpoint would do, but the compiler finds
    that the forward pass has it all, and keeps that."""
    result: Tensor = _Recompute.apply(function, len(parts), *parts, *parameters)
    return result


class _Recompute(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, function: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
        context.function, context.parameters = function, tensors[count:]
        context.save_for_backward(*tensors[:count])
        context.autocast = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
        return function(*tensors[:count])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        needed = context.needs_input_grad[2:]
        copies = [tensor.detach().clone() for tensor in (gradient, *context.saved_tensors)]
        xm.optimization_barrier_(copies)
        gradient, *parts = copies
        wanted = [part.requires_grad_() for part, need in zip(parts, needed, strict=False) if need]
        enabled, dtype = context.autocast
        with torch.enable_grad(), torch.autocast("xla", dtype=dtype, enabled=enabled):
            result = context.function(*parts)
        gradients = iter(torch.autograd.grad(result, [*wanted, *context.parameters], gradient))
        return (None, None, *(next(gradients) if need else None for need in needed))
