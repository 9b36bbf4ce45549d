"""Attention over long rows, in memory that grows with a row's length and not with its square.

For families of `LONG_ATTENTION`, in place of transformers' own: the same function of query, key and value, within
rounding. Queries are computed block by block in the runtime's loop, and again in the backward pass, so that only the
scores of one block exist at a time. A runtime may have a kernel that does the same without storing scores.

Documents of a packed row, and padding, are *segments*, (rows, length) int32: a token sees its own segment only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.config import Attention
from training.errors import BadInput
from training.models.hugging_face import LONG_ATTENTION
from training.models.torch.layer_scan import Loop, Step, Tensors

NAME = "tpu_launch_blocks"  # of transformers' attn_implementation
LONG = 2048  # tokens of a row, from which on plain attention is replaced
_BLOCK_SCORES = 1 << 22  # of a row and a head that exist at a time


@dataclass(frozen=True)
class Scores:
    """How the scores of a layer are made, besides the segments."""

    scale: float
    left: int | None  # how many tokens before itself a token sees; None: all
    right: int | None  # the same after itself
    cap: float | None = None  # scores are cap * tanh(score / cap)


# (query, key, value, segments, scores) -> attended, as `attend`; None for shapes that the kernel does not take.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Scores], Tensor | None]


def choose_attention(
    network: Any, wanted: Attention | None, length: int, *, loop: Loop, kernel: Kernel | str
) -> str | None:
    """Replaces a network's attention if its rows' `length` is LONG or more, its family is in `LONG_ATTENTION` and its
    attention has no dropout; `wanted`, train.attention, decides whatever the length. Returns a line that says how
    attention is computed, and why; None if the network keeps its own. Raises BadInput if wanted blocks or kernel can't
    be had. `loop`: the runtime's; `kernel`: its kernel, or why there is none here: then block by block, as for shapes
    that a kernel does not take."""
    config = network.config
    reason = None
    if config.model_type not in LONG_ATTENTION:
        reason = f"it is untested for a model of type {config.model_type}"
    elif getattr(config, "attention_dropout", 0.0):
        reason = "the model's attention has dropout"
    elif wanted == "kernel" and isinstance(kernel, str):
        reason = kernel
    if wanted in ("blocks", "kernel") and reason:
        raise BadInput(f"train.attention: {wanted} can't be had: {reason}; remove train.attention")
    if wanted == "plain" or reason or (wanted is None and length < LONG):
        return None
    if wanted == "blocks":
        kernel = "train.attention says so"
    how, own = ("by a Pallas kernel", kernel) if callable(kernel) else (f"block by block ({kernel})", None)
    _replace_attention(network, partial(attend_by, loop=loop, kernel=own))
    needed = 4 * config.num_attention_heads * length**2 / 2**30
    return f"rows of {length:,} tokens: attention is computed {how}; scores would take {needed:.2f} GiB a row and layer"


def _replace_attention(network: Any, attention: Callable[..., Tensor]) -> None:
    """Makes a network's modules call `attention`, with the arguments of `attend` but `loop`. Adds functions that call
    it to transformers' tables, under a name that no other network of the process uses."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.modernbert import modeling_modernbert

    ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _find_segments)
    modeling_modernbert.MODERNBERT_ATTENTION_FUNCTION[NAME] = _forward_modernbert
    if network.config.model_type == "modernbert":
        network.base_model._update_attention_mask = lambda mask, output_attentions: (mask.int(), None)
    for module in network.modules():
        module.long_attention = attention
    network.config._attn_implementation = NAME


def _find_segments(
    batch_size: int, cache_position: Tensor, mask_function: Any, attention_mask: Tensor | None = None, **_: Any
) -> Tensor:
    """Returns the segments, (rows, length) int32, where transformers wants a mask: padding apart from text, or the
    documents between places where a token does not see the token before it."""
    if attention_mask is not None:
        return attention_mask.int()
    rows, places = torch.arange(batch_size, device=cache_position.device).unsqueeze(1), cache_position.unsqueeze(0)
    sees = mask_function(rows, 0, places, (places - 1).clamp(min=0))
    return (~sees).int().cumsum(1).int().expand(batch_size, -1)


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes a decoder layer's causal attention by `module.long_attention`: over the `sliding_window` newest tokens,
    with scores capped at `softcap` (None: neither). Has the signature of transformers' attention functions, whose other
    arguments, dropout too, it ignores. query, key, value: as `attend`; `attention_mask`: of `_find_segments`; `scaling`
    None: width ** -0.5. Returns (rows, length, heads, width), and None."""
    left = None if sliding_window is None else sliding_window - 1
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, left, 0, softcap)
    return module.long_attention(query, key, value, attention_mask, scores).transpose(1, 2), None


def _forward_modernbert(
    module: Any, qkv: Tensor, attention_mask: Tensor, position_ids: Tensor, local_attention: tuple[int, int], bs: int,
    dim: int, **_: Any,
) -> tuple[Tensor]:  # fmt: skip
    """Rotates queries and keys by position and computes a layer's attention by `module.long_attention`; has the
    signature of ModernBERT's functions. qkv: (rows, length, 3, heads, width). Returns (rows, length, heads * width) in
    a tuple."""
    from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

    query, key, value = qkv.transpose(3, 1).unbind(dim=2)
    query, key = apply_rotary_pos_emb(query, key, *module.rotary_emb(qkv, position_ids=position_ids))
    scores = Scores(module.head_dim**-0.5, *(None if side < 0 else side for side in local_attention))
    return (module.long_attention(query, key, value, attention_mask, scores).transpose(1, 2).reshape(bs, -1, dim),)


def attend_by(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scores: Scores, *, loop: Loop, kernel: Kernel | None
) -> Tensor:
    """Returns what `attend` returns, in the step's precision: by the kernel if it takes the shapes."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    attended = kernel(query, key, value, segments, scores) if kernel else None
    return attend(query, key, value, segments, scores, loop) if attended is None else attended


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scores: Scores, loop: Loop) -> Tensor:
    """Returns softmax(scores) value, (rows, heads, length, width), a block of queries at a time. `query` has that
    shape; `key` and `value` may have fewer heads, each of which several heads of `query` share."""
    attended: Tensor = _Blocks.apply(scores, loop, query, key, value, segments)
    return attended


def loop_in_python(step: Step, carry: Tensors, stacked: Tensors, _turned: int) -> tuple[Tensors, Tensors]:
    """Runs `step` on each slice of `stacked` in turn; returns the last carry and the stacked results. A `Loop` for
    runtimes without one of their own."""
    results: list[list[Tensor]] = []
    for slices in zip(*stacked, strict=True):
        carry, result = step(carry, list(slices))
        results.append(result)
    return carry, [torch.stack(parts) for parts in zip(*results, strict=True)]


class _Blocks(torch.autograd.Function):  # type: ignore[misc]  # torch is not here when types are checked
    """`attend`, which keeps its arguments alone."""

    @staticmethod
    def forward(
        context: Any, scores: Scores, loop: Loop, query: Tensor, key: Tensor, value: Tensor, segments: Tensor
    ) -> Tensor:
        """Returns `attend`'s result; keeps its arguments for the backward pass."""
        context.scores, context.loop = scores, loop
        context.save_for_backward(query, key, value, segments)

        def step(row: list[Tensor], each: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            return row, [_attend_block(scores, *each, *row)]

        _, [result] = loop(step, [segments, key, value], _split_queries(query, segments), 0)
        return _join_blocks(result, query.shape[2])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """Computes each block again. Returns the gradients of query, key and value; the last two are summed in fp32."""
        query, key, value, segments = context.saved_tensors

        def step(carry: list[Tensor], each: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            *totals, own_segments, own_key, own_value = carry
            of_result, own_query, of_queries, start = each
            leaves = [tensor.detach().requires_grad_() for tensor in (own_query, own_key, own_value)]
            with torch.enable_grad():
                result = _attend_block(context.scores, leaves[0], of_queries, start, own_segments, *leaves[1:])
            of_query, *found = torch.autograd.grad(result, leaves, of_result)
            totals = [total + part.float() for total, part in zip(totals, found, strict=True)]
            return [*totals, *carry[2:]], [of_query]

        zeros = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value)]
        blocks = [_split_queries(gradient, segments)[0], *_split_queries(query, segments)]
        (of_key, of_value, *_), [of_query] = context.loop(step, [*zeros, segments, key, value], blocks, 0)
        return None, None, _join_blocks(of_query, query.shape[2]), of_key.to(key.dtype), of_value.to(value.dtype), None


def _split_queries(query: Tensor, segments: Tensor) -> list[Tensor]:
    """Returns blocks of queries (blocks, rows, heads, block, width), of their segments (blocks, rows, block), and their
    first places (blocks,). The last block is filled up with queries of a segment of their own."""
    length = query.shape[2]
    block = min(length, max(128, _BLOCK_SCORES // length))
    queries = functional.pad(query, (0, 0, 0, -length % block)).unflatten(2, (-1, block)).movedim(2, 0)
    of_queries = functional.pad(segments, (0, -length % block), value=-1).unflatten(1, (-1, block)).movedim(1, 0)
    return [queries, of_queries, torch.arange(len(queries), dtype=torch.int32, device=query.device) * block]


def _join_blocks(blocks: Tensor, length: int) -> Tensor:
    """Returns (rows, heads, length, width) of (blocks, rows, heads, block, width)."""
    return blocks.movedim(0, 2).flatten(2, 3)[:, :, :length]


def _attend_block(
    scores: Scores, query: Tensor, of_queries: Tensor, start: Tensor, of_keys: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Returns (rows, heads, block, width) for the block of queries that starts at place `start`, with segments
    `of_queries`; keys and values are the whole row's, with segments `of_keys`."""
    rows, heads, block, width = query.shape
    groups, keys = key.shape[1:3]
    products = torch.matmul(query.reshape(rows, groups, -1, width), key.transpose(-1, -2)).float() * scores.scale
    if scores.cap is not None:
        products = torch.tanh(products / scores.cap) * scores.cap
    distances = (torch.arange(block, dtype=torch.int32, device=query.device) + start).unsqueeze(1) - torch.arange(
        keys, dtype=torch.int32, device=query.device
    )  # (block, keys)
    seen = of_queries.unsqueeze(2) == of_keys.unsqueeze(1)  # (rows, block, keys)
    seen = seen if scores.left is None else seen & (distances <= scores.left)
    seen = seen if scores.right is None else seen & (-distances <= scores.right)
    products = products.view(rows, heads, block, keys).masked_fill(~seen.unsqueeze(1), torch.finfo(torch.float32).min)
    probabilities = torch.softmax(products, -1).to(value.dtype).view(rows, groups, -1, keys)
    return torch.matmul(probabilities, value).view(rows, heads, block, width)
