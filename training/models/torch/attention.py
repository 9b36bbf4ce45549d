"""Self-attention of BERT and RoBERTa in less memory, over the weights of Hugging Face's modules; and computing again in
the backward pass what was not kept.

Attention computes what theirs does (scores and softmax in fp32, products in the step's precision), but may keep only
query, key, value and result for the backward pass: scores and probabilities, (rows, heads, sequence, sequence) each,
are computed a second time there. That is 3 % of the work of bert-large at 512 tokens, and a third of its memory (`make
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


class Linear(torch.nn.Linear):  # type: ignore[misc]  # torch is not here when types are checked
    """Computes what torch's own does of (rows, sequence, width). Its weight's gradient sums over two axes: joined to
    one, as torch does, the TPU compiler would copy gradients of attention, where the sequence is the innermost axis."""

    def forward(self, values: Tensor) -> Tensor:
        """Returns (rows, sequence, outputs) of (rows, sequence, width), by an einsum under autocast only."""
        if not torch.is_autocast_enabled(values.device.type):  # torch_xla's einsum never has the precision "highest"
            return super().forward(values)
        product = torch.einsum("rsi,oi->rso", values, self.weight)
        return product + self.bias.to(product.dtype)


class SelfAttention(torch.nn.Module):  # type: ignore[misc]  # torch is not here when types are checked
    """Replaces BertSelfAttention or RobertaSelfAttention, with the same weights under the same names."""

    def __init__(self, theirs: Any, dropout: Dropout, *, recompute_behind: Barrier | None) -> None:
        """Takes the weights of `theirs`, Hugging Face's module. `dropout`: of the probabilities; `recompute_behind`: if
        given, scores and probabilities are computed a second time in the backward pass, behind this barrier."""
        super().__init__()
        self.query, self.key, self.value, self.dropout = theirs.query, theirs.key, theirs.value, dropout
        self.heads, self.barrier = theirs.num_attention_heads, recompute_behind

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Returns attended `hidden_states`, and None; `attention_mask`, (rows, 1, 1, sequence), is added to scores."""
        parts = (self.query(hidden_states), self.key(hidden_states), self.value(hidden_states), attention_mask)
        return (_Attend.apply(self, *parts) if self.barrier else self.attend(*parts)), None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns the attended values from query, key and value, all (rows, sequence, width), and the mask."""
        return self.mix(torch.softmax(self.score(query, key, attention_mask), -1), value)

    def score(self, query: Tensor, key: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns scores of queries and keys, both (rows, sequence, width), with the mask: (rows, heads, sequence,
        sequence) in fp32."""
        query, key = self.split(query), self.split(key)
        return torch.matmul(query, key.transpose(-1, -2)).float() / math.sqrt(query.shape[-1]) + attention_mask

    def mix(self, probabilities: Tensor, value: Tensor) -> Tensor:
        """Returns `value`, (rows, sequence, width), weighted by `probabilities`, (rows, heads, sequence, sequence),
        after their dropout: (rows, sequence, width)."""
        probabilities = self.dropout(probabilities.to(value.dtype))
        return torch.matmul(probabilities, self.split(value)).transpose(1, 2).reshape(value.shape)

    def split(self, projection: Tensor) -> Tensor:
        """Returns (rows, heads, sequence, width of a head) from (rows, sequence, width)."""
        return projection.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _Attend(torch.autograd.Function):  # type: ignore[misc]
    """`SelfAttention.attend`, which keeps its arguments, its result and one number for each line of scores."""

    @staticmethod
    def forward(context: Any, module: SelfAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Returns `module`'s attention, and keeps for the backward pass no probabilities, but each line's logsumexp."""
        scores = module.score(query, key, mask)
        largest = scores.amax(-1, keepdim=True)
        total = largest + (scores - largest).exp().sum(-1, keepdim=True).log()  # (rows, heads, sequence, 1)
        result = module.mix((scores - total).exp(), value)
        context.save_for_backward(query, key, value, mask, total, result)
        context.module, device = module, query.device.type
        context.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """Returns the gradients of query, key and value, from probabilities computed a second time. Softmax's gradient
        needs the sum, over a line, of probabilities times their gradient: that of result times gradient
        (FlashAttention, https://arxiv.org/abs/2205.14135)."""
        module, (query, *others) = context.module, context.saved_tensors
        copies = [tensor.detach().clone() for tensor in (gradient, query)]
        module.barrier(copies)
        gradient, query = copies
        key, value, mask, total, result = (tensor.detach() for tensor in others)
        with torch.enable_grad(), torch.autocast(*context.autocast):
            scores = module.score(query.requires_grad_(), key.requires_grad_(), mask)
            probabilities = (scores.detach() - total).exp().requires_grad_()
            result_again = module.mix(probabilities, value.requires_grad_())
        found, of_value = torch.autograd.grad(result_again, [probabilities, value], gradient)
        line = (module.split(gradient).float() * module.split(result).float()).sum(-1, keepdim=True)
        return None, *torch.autograd.grad(scores, [query, key], probabilities.detach() * (found - line)), of_value, None


def recompute(
    function: Callable[..., Tensor], parts: Sequence[Tensor], barrier: Barrier, parameters: Sequence[Tensor] = ()
) -> Tensor:
    """Returns function(*parts), and keeps nothing but `parts` for the backward pass, which computes it a second time,
    behind `barrier`, under the same autocast but without the random state of the first time. `parameters`: what else
    `function` reads that wants gradients; all must require them.

    torch.utils.checkpoint has no barrier: XLA then finds all of it in the forward pass, and keeps that."""
    result: Tensor = _Recompute.apply(function, barrier, len(parts), *parts, *parameters)
    return result


class _Recompute(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        context: Any, function: Callable[..., Tensor], barrier: Barrier, count: int, *tensors: Tensor
    ) -> Tensor:
        """Returns function(*tensors[:count]) and keeps these tensors only. The others are the parameters that the
        function uses, which get gradients too."""
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
