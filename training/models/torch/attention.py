"""Self-attention of BERT and RoBERTa in less memory, over the weights of Hugging Face's modules; and computing again in
the backward pass what was not kept.

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
from torch import Tensor

from training.models.torch.dropout import Dropout

# Keeps the compiler from moving operations across this point, in place. Without it, the compiler merges the second
# computation with the first, and keeps everything after all.
Barrier = Callable[[list[Tensor]], None]


class SelfAttention(torch.nn.Module):  # type: ignore[misc]  # torch is not here when types are checked
    """Replaces BertSelfAttention or RobertaSelfAttention, with the same weights under the same names."""

    def __init__(self, theirs: Any, dropout: Dropout, *, recompute_behind: Barrier | None) -> None:
        """Takes the weights of `theirs`, Hugging Face's module. `dropout`: of the probabilities; `recompute_behind`: if
        given, scores and probabilities are computed a second time in the backward pass, behind this barrier."""
        super().__init__()
        self.query, self.key, self.value, self.dropout = theirs.query, theirs.key, theirs.value, dropout
        self.heads, self.barrier = theirs.num_attention_heads, recompute_behind

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Returns (rows, sequence, width) from the same; `attention_mask`, (rows, 1, 1, sequence), is added to
        scores."""
        parts = (self.query(hidden_states), self.key(hidden_states), self.value(hidden_states), attention_mask)
        return (recompute(self.attend, parts, self.barrier) if self.barrier else self.attend(*parts)), None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns (rows, sequence, width) from three of that shape and the mask."""
        rows, length, width = query.shape
        query, key, value = (
            projection.view(rows, length, self.heads, -1).transpose(1, 2) for projection in (query, key, value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)).float() / math.sqrt(
            width // self.heads
        )  # (rows, heads, sequence, sequence)
        probabilities = self.dropout(torch.softmax(scores + attention_mask, -1).to(value.dtype))
        return torch.matmul(probabilities, value).transpose(1, 2).reshape(rows, length, width)


def recompute(
    function: Callable[..., Tensor], parts: Sequence[Tensor], barrier: Barrier, parameters: Sequence[Tensor] = ()
) -> Tensor:
    """Returns function(*parts), and keeps nothing but `parts` for the backward pass, which computes it a second time.

    torch.utils.checkpoint has no barrier: XLA then finds all of it in the forward pass, and keeps that.

    Args:
        function: of tensors.
        parts: its arguments.
        barrier: stands between the two computations.
        parameters: what else `function` reads that wants gradients.
    """
    result: Tensor = _Recompute.apply(function, barrier, len(parts), *parts, *parameters)
    return result


class _Recompute(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        context: Any, function: Callable[..., Tensor], barrier: Barrier, count: int, *tensors: Tensor
    ) -> Tensor:
        """Computes function(*tensors[:count]) and keeps these tensors only; the other tensors are `parameters`."""
        context.function, context.barrier, context.parameters = function, barrier, tensors[count:]
        context.save_for_backward(*tensors[:count])
        device = tensors[0].device.type
        context.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return function(*tensors[:count])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """Computes the function a second time, behind the barrier, and returns the gradients of what needs them."""
        needed = context.needs_input_grad[3:]
        copies = [tensor.detach().clone() for tensor in (gradient, *context.saved_tensors)]
        context.barrier(copies)
        gradient, *parts = copies
        wanted = [part.requires_grad_() for part, need in zip(parts, needed, strict=False) if need]
        with torch.enable_grad(), torch.autocast(*context.autocast):
            result = context.function(*parts)
        gradients = iter(torch.autograd.grad(result, [*wanted, *context.parameters], gradient))
        return (None, None, None, *(next(gradients) if need else None for need in needed))
