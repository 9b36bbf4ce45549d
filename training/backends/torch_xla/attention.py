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

    def __init__(self, theirs: Any, dropout: Dropout, *, again: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dropout = theirs.query, theirs.key, theirs.value, dropout
        self.heads, self.again = theirs.num_attention_heads, again

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """(rows, sequence, width) to the same; `attention_mask` is added to scores, (rows, 1, 1, sequence)."""
        parts = (self.query(hidden_states), self.key(hidden_states), self.value(hidden_states), attention_mask)
        return (again(self.mixed, parts) if self.again else self.mixed(*parts)), None

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        rows, length, width = query.shape
        query, key, value = (each.view(rows, length, self.heads, -1).transpose(1, 2) for each in (query, key, value))
        scores = torch.matmul(query, key.transpose(-1, -2)).float() / math.sqrt(
            width // self.heads
        )  # (rows, heads, sequence, sequence)
        probabilities = self.dropout(torch.softmax(scores + attention_mask, -1).to(value.dtype))
        return torch.matmul(probabilities, value).transpose(1, 2).reshape(rows, length, width)


def again(function: Callable[..., Tensor], parts: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> Tensor:
    """function(*parts), of which nothing is kept for the backward pass but `parts`: there it is computed a second time.
    `parameters` are what else it reads that wants gradients. torch.utils.checkpoint would do, but the compiler finds
    that the forward pass has it all, and keeps that."""
    result: Tensor = _Again.apply(function, len(parts), *parts, *parameters)
    return result


class _Again(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, function: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
        context.function, context.parameters = function, tensors[count:]
        context.save_for_backward(*tensors[:count])
        context.autocast = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
        return function(*tensors[:count])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        needed = context.needs_input_grad[2:]
        copies = [each.detach().clone() for each in (gradient, *context.saved_tensors)]
        xm.optimization_barrier_(copies)
        gradient, *parts = copies
        wanted = [part.requires_grad_() for part, need in zip(parts, needed, strict=False) if need]
        enabled, dtype = context.autocast
        with torch.enable_grad(), torch.autocast("xla", dtype=dtype, enabled=enabled):
            result = context.function(*parts)
        found = iter(torch.autograd.grad(result, [*wanted, *context.parameters], gradient))
        return (None, None, *(next(found) if need else None for need in needed))
