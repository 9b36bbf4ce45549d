"""Attention by splash attention, JAX's Pallas kernel for TPUs, in programs of torch_xla.

Each device computes its own rows: the compiler can't split a kernel. JAX only lowers the kernel, for TPUs, and runs
nothing. The forward pass keeps what JAX's backward pass needs, the logarithm of each softmax's sum among it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from training.backends.torch_xla import internals
from training.backends.torch_xla.sharding import DataParallel
from training.models.torch.long_attention import Kernel, Scores

_BLOCKS = (512, 256, 128)  # sizes of a block of queries or keys; the kernel wants multiples of 128
_SIZES = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")

Shapes = tuple[tuple[tuple[int, ...], str], ...]  # shape and type of each tensor


def splash_attention(sharding: DataParallel, platform: str = "tpu") -> Kernel:
    """Returns the kernel for devices of `sharding`, which gives None for rows whose length is no multiple of 128.
    `platform` "cpu" interprets it, for tests."""

    def attend(query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scores: Scores) -> Tensor | None:
        """Returns the attended values; None unless the rows' length is a multiple of 128."""
        if query.shape[2] % _BLOCKS[-1]:
            return None
        scaled = (query.float() * scores.scale).to(query.dtype)
        return _Splash.apply(sharding, platform, scores, scaled, key, value, segments.int())

    return attend


class _Splash(torch.autograd.Function):  # type: ignore[misc]  # torch is not here when types are checked
    @staticmethod
    def forward(context: Any, sharding: DataParallel, platform: str, scores: Scores, *inputs: Tensor) -> Tensor:
        """Returns attended values, (rows, heads, length, width). `inputs`: scaled query, key, value, segments."""
        parts = [sharding.enter_rows(tensor) for tensor in inputs]
        shapes = tuple((tuple(part.shape), str(part.dtype).removeprefix("torch.")) for part in parts)
        forward, context.pull_back = _lower(shapes, scores, platform)
        result, *kept = forward(parts)
        context.sharding, context.shapes = sharding, [tensor.shape for tensor in inputs[:3]]
        context.save_for_backward(*kept)
        return sharding.leave_rows(result, inputs[0].shape)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """Returns the gradients of query, key and value; None for each other argument of `forward`."""
        found = context.pull_back([*context.saved_tensors, context.sharding.enter_rows(gradient)])
        places = zip(found, context.shapes, strict=True)
        return (None, None, None, *(context.sharding.leave_rows(part, shape) for part, shape in places), None)


@lru_cache(maxsize=32)
def _lower(shapes: Shapes, scores: Scores, platform: str) -> tuple[internals.TensorFunction, internals.TensorFunction]:
    """Returns (query, key, value, segments) -> (attended, *kept), and (*kept, gradient) -> gradients of the first
    three, for tensors of these shapes on one device. Imports JAX, and sets JAX_PLATFORMS to "cpu" unless it is set."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else JAX would open the TPU that torch_xla has open
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (_, heads, length, _), _ = shapes[0]
    left, right = scores.left, scores.right
    is_narrow = left is not None and right is not None and left + right < _BLOCKS[0]
    block = next(size for size in _BLOCKS[is_narrow:] if length % size == 0)
    square, is_full = (length, length), left is None and right is None
    mask = masks.FullMask(square) if is_full else masks.LocalMask(square, (left, right), 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads), block_sizes=splash.BlockSizes(**dict.fromkeys(_SIZES, block)),
        attn_logits_soft_cap=scores.cap, head_shards=1, q_seq_shards=1, interpret=platform == "cpu",
    )  # fmt: skip
    structures: list[Any] = []

    def forward(query: Any, key: Any, value: Any, segments: Any) -> tuple[Any, ...]:
        own = splash.SegmentIds(segments, segments)
        result, pull_back = jax.vjp(lambda *parts: jax.vmap(kernel)(*parts, own), query, key, value)
        kept, structure = jax.tree.flatten(pull_back)
        structures[:] = [structure]
        return (result, *kept)

    def backward(*inputs: Any) -> Any:
        return jax.tree.unflatten(structures[0], inputs[:-1])(inputs[-1])

    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    result, *kept = jax.eval_shape(forward, *given)
    return (
        internals.call_lowered(forward, given, platform, "splash_attention"),
        internals.call_lowered(backward, [*kept, result], platform, "splash_attention_gradient"),
    )
