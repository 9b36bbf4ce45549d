"""The sums of each task in torch, without a runtime of torch: `sums(network, batch)` of the registry.

Each returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over the given rows; and further counts
for an evaluation, or None.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.models.torch.network import apply_head

# A row with at least so many logits (half a GiB in fp32) is computed in pieces of at most half as many: otherwise all
# logits and their gradient would be in memory at the same time.
_WHOLE_LOGITS = 1 << 27


def masked_lm(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Returns (3,), sums of loss, weights and hits (training.batch.SUMS) at masked positions; and None. Computes the
    head there alone, unless the network `applies_whole_head`."""
    ids = batch["input_ids"].long()  # (rows, sequence)
    # Rows have no padding. Without any mask the model would look for some, which costs a device-to-host round trip each
    # step.
    whole = getattr(network, "applies_whole_head", False)
    encoder = network if whole else network.base_model
    hidden = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))[0]  # (rows, sequence, width), or logits
    # As a matrix product, which is exact: backwards, a gather is a scatter into the global batch, added up over all
    # devices.
    chosen = batch["positions"].unsqueeze(-1) == torch.arange(hidden.shape[1], dtype=torch.int32, device=hidden.device)
    hidden = torch.bmm(chosen.to(hidden.dtype), hidden)  # (rows, predictions, sequence) times (rows, sequence, width)
    logits = hidden if whole else apply_head(network, hidden)  # (rows, predictions, vocabulary)
    logits = logits.float().flatten(0, 1)  # (rows * predictions, vocabulary)
    labels = batch["labels"].long().flatten().clamp(min=0)  # (rows * predictions,)
    weights = batch["weights"].flatten()
    return cross_entropy_sums(network, logits, labels, weights), None


def causal_lm(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Returns (3,), sums of loss, weights and hits over all tokens; and None. A label is the id that follows its token.
    If the network `has_plain_head`, computes a large number of logits in pieces, some tokens of each row at a time.
    Without an attention mask, transformers adds borders of documents, where positions begin again, to the causal mask:
    `network.check_borders` tests it."""
    rows = {
        "input_ids": batch["input_ids"].long(), "position_ids": batch["position_ids"].long(), "use_cache": False,
    }  # fmt: skip
    labels, weights = batch["labels"].long(), batch["weights"]  # (rows, sequence) each

    def token_sums(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:  # (rows, sequence, vocabulary), ...
        return cross_entropy_sums(network, logits.float().flatten(0, 1), labels.flatten(), weights.flatten())

    if not hasattr(network, "has_plain_head") or labels.shape[1] * network.config.vocab_size < _WHOLE_LOGITS:
        return token_sums(network(**rows).logits, labels, weights), None

    def head_sums(hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return token_sums(network.lm_head(hidden), labels, weights)

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
        """Returns the sums (3,), and keeps the gradients of the loss. `tokens`: of each row in a piece; `tensors`:
        hidden, labels, weights, the head's parameters."""
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


def classification(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (3,), sums of loss, weights and hits (training.batch.SUMS) over rows or tokens; and the confusion matrix
    of weights, (true class, predicted class)."""
    logits, labels = logits_of(network, batch), batch["labels"].long()
    if logits.ndim > 2:  # (rows, tokens, labels)
        logits, labels = logits.flatten(0, 1), labels.clamp(min=0).flatten()
    weights = batch["weights"].flatten()
    classes = torch.arange(logits.shape[-1], device=logits.device)
    true = (labels.unsqueeze(1) == classes).float() * weights.unsqueeze(1)  # (predictions, classes)
    predicted = (logits.argmax(-1).unsqueeze(1) == classes).float()  # (predictions, classes)
    # Not a matrix product: in bf16 that would round the counts.
    confusion = (true.unsqueeze(2) * predicted.unsqueeze(1)).sum(0)  # (classes, classes)
    return cross_entropy_sums(network, logits, labels, weights), confusion


def multi_label(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (3,), sums of loss, weights, hits over rows and labels; and (3,), the totals of
    tasks.labels.MultiLabel."""
    logits, labels = logits_of(network, batch), batch["labels"].float()  # (rows, labels) each
    weights = batch["weights"].unsqueeze(1).expand_as(labels)  # (rows, labels)
    losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    predicted = (logits > 0).float()
    values = [losses, torch.ones_like(labels), (predicted == labels).float(), predicted * labels, labels, predicted]
    totals = [(value * weights).sum() for value in values]
    return torch.stack(totals[:3]), torch.stack(totals[3:])


def regression(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (3,): squared errors, weights, 0; and (6,), the totals of training.tasks.labels.Regression."""
    predictions = logits_of(network, batch)[:, 0]  # (rows,)
    labels, weights = batch["labels"], batch["weights"]  # (rows,)
    errors = predictions - labels
    report = torch.stack([(errors.square() * weights).sum(), weights.sum(), torch.zeros_like(weights[0])])
    values = [
        errors.abs(), predictions, labels, predictions.square(), labels.square(), predictions * labels,
    ]  # fmt: skip
    return report, torch.stack([(value * weights).sum() for value in values])


def logits_of(network: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the fp32 logits of a network with a classifier's head, (rows, labels) or (rows, tokens, labels)."""
    rows = {name: batch[name].long() for name in ("input_ids", "attention_mask")}
    if "token_type_ids" in batch and getattr(network.config, "type_vocab_size", 0) > 1:  # of two texts
        rows["token_type_ids"] = batch["token_type_ids"].long()
    return network(**rows).logits.float()


def cross_entropy_sums(network: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Returns (3,) over all predictions: weighted cross-entropy, weights, weighted hits (training.batch.SUMS). Labels
    are smoothed in training by train.label_smoothing, which the backend leaves in the network. logits: (predictions,
    classes) float32; labels: (predictions,) int64; weights: (predictions,) float32."""
    smoothing = float(getattr(network, "label_smoothing", 0.0)) if network.training else 0.0
    losses = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    hits = (first_largest(logits.detach()) == labels).float()
    return torch.stack([(losses * weights).sum(), weights.sum(), (hits * weights).sum()])


def first_largest(logits: Tensor) -> Tensor:
    """Returns `argmax` over the last axis, int32; torch's own takes the TPU compiler 8 s longer. Where a logit is NaN,
    the result may be one beyond the last place."""
    places = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    is_largest = logits == logits.amax(-1, keepdim=True)
    return torch.where(is_largest, places, torch.full_like(places, logits.shape[-1])).amin(-1)
