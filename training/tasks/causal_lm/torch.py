"""Causal language modelling in torch: the loss over the given rows."""

from typing import Any

import torch
from torch import Tensor

from training.tasks.torch_sums import cross_entropy_sums, smoothing

# A row with at least so many logits (half a GiB in fp32) is computed in pieces of at most half as many: otherwise all
# logits and their gradient would be in memory at the same time.
_WHOLE_LOGITS = 1 << 27


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over the given rows; and None, as the
    task has no counts. Computes a large number of logits in pieces of a row, one after the other. Without an attention
    mask, transformers takes positions that begin again as borders of documents, and adds them to the causal mask;
    `check_borders` of training.models.torch.network proves it for a network."""
    rows = {
        "input_ids": batch["input_ids"].long(), "position_ids": batch["position_ids"].long(), "use_cache": False,
    }  # fmt: skip
    labels, weights = batch["labels"].long(), batch["weights"]  # (rows, sequence) each
    if not hasattr(network, "has_plain_head") or labels.shape[1] * network.config.vocab_size < _WHOLE_LOGITS:
        return _sums_of(network(**rows).logits, labels, weights, smoothing(network)), None

    def head_sums(hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return _sums_of(network.lm_head(hidden), labels, weights, smoothing(network))

    hidden = network.base_model(**rows)[0]  # (rows, sequence, width)
    tokens = max(1, _WHOLE_LOGITS // 2 // network.config.vocab_size)  # of a piece
    tokens -= tokens % 128 if tokens > 128 else 0  # a multiple of the TPU's tile
    trained = [parameter for parameter in network.lm_head.parameters() if parameter.requires_grad]
    total: Tensor = _Pieces.apply(head_sums, tokens, hidden, labels, weights, *trained)
    return total, None


class _Pieces(torch.autograd.Function):  # type: ignore[misc]  # torch is not here when types are checked
    """Computes the sums piece by piece, each with its gradients at once, so that no logits are kept or computed again.
    In an evaluation nothing reads the gradients, and torch_xla leaves them out of the program."""

    @staticmethod
    def forward(context: Any, head_sums: Any, tokens: int, *tensors: Tensor) -> Tensor:
        """Returns the sums (3,). `tokens`: of a piece; `tensors`: hidden, labels, weights, the head's parameters."""
        total, of_hidden, trained = torch.zeros(3, device=tensors[0].device), [], tensors[3:]
        of_trained = [torch.zeros_like(parameter) for parameter in trained]
        for part, *others in zip(*(tensor.split(tokens, 1) for tensor in tensors[:3]), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                found = head_sums(part, *others)
                of_part, *more = torch.autograd.grad(found[0], [part, *trained])
            of_hidden.append(of_part)
            of_trained = [before + new for before, new in zip(of_trained, more, strict=True)]
            total = total + found.detach()
        context.save_for_backward(torch.cat(of_hidden, 1), *of_trained)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """Returns the gradients of the loss, the first of the sums: the others have none."""
        of_hidden, *of_trained = (found * gradient[0] for found in context.saved_tensors)
        return (None, None, of_hidden, None, None, *of_trained)


def _sums_of(logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """Returns the sums over rows: logits (rows, sequence, vocabulary), labels and weights (rows, sequence)."""
    return cross_entropy_sums(logits.float().flatten(0, 1), labels.flatten(), weights.flatten(), smoothing)
