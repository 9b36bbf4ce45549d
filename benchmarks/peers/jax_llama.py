"""The peer of a Llama's training step: the same mathematics in plain JAX, as JAX's own users write it.

The layers are a `lax.scan` of `jax.checkpoint`, attention is JAX's splash attention with the blocks of 512 that ours
has, and matrices, moments and rows are split over all devices by `NamedSharding`. As in ours, the products are bf16,
their sums, the hidden states and the optimizer fp32, and the step returns its loss and its hits. All logits of a row
exist at once, so that the head is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from training.preflight.compiler import Program

BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
RATE, DECAY, BETA1, BETA2, EPSILON = 1e-4, 0.01, 0.9, 0.999, 1e-6


def trace_step(config: Mapping[str, Any], vocabulary: int, rows: int, length: int, devices: int) -> Program:
    """Returns the program of a step, for the TPU compiler; `config`: of a model's config.json. It is exported, so that
    it has the version of Pallas' programs that this libtpu reads."""
    jax.config.update(
        "jax_use_shardy_partitioner", False
    )  # else the text has shardings that preflight does not pass on
    mesh = AbstractMesh((devices,), ("devices",))

    def placed(shape: tuple[int, ...], axis: int | None, dtype: Any = jnp.float32) -> Any:
        spec = [None] * len(shape) if axis is None else ["devices" if at == axis else None for at in range(len(shape))]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def weight(*shape: int) -> Any:
        return placed(shape, int(np.argmax(shape)) if len(shape) > 1 else None)

    def stacked(*shape: int) -> Any:
        axis = 1 + int(np.argmax(shape)) if len(shape) > 1 else None
        return placed((config["num_hidden_layers"], *shape), axis)

    width, wide = config["hidden_size"], config["intermediate_size"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    narrow = width // heads * shared
    parameters = {
        "embedding": weight(vocabulary, width), "head": weight(vocabulary, width), "norm": weight(width),
        "layers": {
            "first": stacked(width), "second": stacked(width), "query": stacked(width, width),
            "key": stacked(width, narrow), "value": stacked(width, narrow), "output": stacked(width, width),
            "gate": stacked(width, wide), "up": stacked(width, wide), "down": stacked(wide, width),
        },
    }  # fmt: skip
    ids, weights = placed((rows, length), 0, jnp.int32), placed((rows, length), 0)
    batch = {"ids": ids, "positions": ids, "labels": ids, "weights": weights}
    moments = (parameters, parameters)
    scalars = placed((3,), None)
    loss = _Loss(config, mesh, length).sums

    def step(parameters: Any, moments: Any, batch: Any, scalars: Any) -> Any:
        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, batch)
        norm = jnp.sqrt(sum(jnp.square(value).sum() for value in jax.tree.leaves(gradients))) / sums[1]
        scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6)) / sums[1]
        rate, correction1, correction2 = scalars

        def update(value: Any, gradient: Any, first: Any, second: Any) -> Any:
            gradient = gradient * scale
            first = BETA1 * first + (1 - BETA1) * gradient
            second = BETA2 * second + (1 - BETA2) * gradient * gradient
            change = (first / correction1) / (jnp.sqrt(second / correction2) + EPSILON)
            return value - rate * (change + (DECAY * value if value.shape[-2:-1] else 0.0)), first, second

        found = jax.tree.map(update, parameters, gradients, *moments)
        new, *others = (jax.tree.map(lambda _, each, at=at: each[at], parameters, found) for at in range(3))
        return new, tuple(others), jnp.append(sums, norm)

    kept = jax.tree.map(lambda value: value.sharding, (parameters, moments))
    report = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*kept, report))
    exported = jax.export.export(jitted, platforms=["tpu"])(parameters, moments, batch, scalars)
    return Program(exported.mlir_module())


class _Loss:
    """The summed loss of a batch."""

    def __init__(self, config: Mapping[str, Any], mesh: AbstractMesh, length: int) -> None:
        self.config, self.mesh = config, mesh
        heads = config["num_attention_heads"]
        self.heads, self.shared = heads, config["num_key_value_heads"]
        mask = masks.MultiHeadMask([masks.LocalMask((length, length), (None, 0), 0)] * heads)
        sizes = splash.BlockSizes(**dict.fromkeys(BLOCKS, 512))
        kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

        def attend(query: Any, key: Any, value: Any, segments: Any) -> Any:
            return jax.vmap(kernel)(query, key, value, splash.SegmentIds(segments, segments))

        rows = PartitionSpec("devices")
        self.attend = jax.shard_map(attend, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, check_vma=False)

    def sums(self, parameters: Any, batch: Any) -> tuple[Any, Any]:
        """Returns the loss, and (loss, weights, weighted hits)."""
        hidden = self._split(parameters["embedding"][batch["ids"]])
        segments = jnp.cumsum(batch["positions"] == 0, axis=1).astype(jnp.int32)
        half = hidden.shape[-1] // self.heads // 2
        steps = self.config["rope_theta"] ** -(jnp.arange(half) / half)
        angles = batch["positions"][:, None, :, None] * jnp.concatenate([steps, steps])

        @jax.checkpoint
        def layer(hidden: Any, values: Any) -> tuple[Any, None]:
            return self._layer(hidden, values, segments, jnp.cos(angles), jnp.sin(angles)), None

        hidden, _ = jax.lax.scan(layer, hidden, parameters["layers"])
        hidden = self._norm(hidden, parameters["norm"])
        logits = (hidden @ self._whole(parameters["head"]).T).astype(jnp.float32)
        places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        labelled = jnp.where(places == batch["labels"][..., None], logits, 0.0).sum(-1)
        loss = ((jax.nn.logsumexp(logits, axis=-1) - labelled) * batch["weights"]).sum()
        largest = jax.lax.stop_gradient(logits).max(-1, keepdims=True)
        best = jnp.where(jax.lax.stop_gradient(logits) == largest, places, logits.shape[-1]).min(-1)
        hits = ((best == batch["labels"]) * batch["weights"]).sum()
        return loss, jnp.stack([loss, batch["weights"].sum(), hits])

    def _layer(self, hidden: Any, values: Any, segments: Any, cosine: Any, sine: Any) -> Any:
        rows, length, width = hidden.shape

        def split_heads(product: Any, heads: int) -> Any:
            return product.reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)

        def rotate(heads: Any) -> Any:
            first, second = jnp.split(heads, 2, axis=-1)
            return heads * cosine + jnp.concatenate([-second, first], -1) * sine

        entered = self._norm(hidden, values["first"])
        query, key, value = (
            split_heads(entered @ self._whole(values[name]), heads)
            for name, heads in (("query", self.heads), ("key", self.shared), ("value", self.shared))
        )
        query = (rotate(query) * (width // self.heads) ** -0.5).astype(jnp.bfloat16)
        attended = self.attend(query, rotate(key).astype(jnp.bfloat16), value, segments)
        attended = attended.transpose(0, 2, 1, 3).reshape(rows, length, width)
        hidden = hidden + attended @ self._whole(values["output"])
        entered = self._norm(hidden, values["second"])
        gated = jax.nn.silu(entered @ self._whole(values["gate"])) * (entered @ self._whole(values["up"]))
        return self._split(hidden + gated @ self._whole(values["down"]))

    def _norm(self, hidden: Any, weight: Any) -> Any:
        mean = jnp.square(hidden).mean(-1, keepdims=True)
        return (hidden * jax.lax.rsqrt(mean + self.config["rms_norm_eps"]) * weight).astype(jnp.bfloat16)

    def _whole(self, weight: Any) -> Any:
        """Gathers a matrix on every device, in bf16."""
        return jax.lax.with_sharding_constraint(
            weight.astype(jnp.bfloat16), NamedSharding(self.mesh, PartitionSpec(None, None))
        )

    def _split(self, hidden: Any) -> Any:
        return jax.lax.with_sharding_constraint(hidden, NamedSharding(self.mesh, PartitionSpec("devices")))
