"""A decoder of Llama's kind whose layers are one scan, without weights, through the trainer's own step.

The trainer's own networks have their layers one after the other, which the TPU compiler takes hours for at 32 layers of
this width. Here the layers' parameters are stacked, (layers, ...), one layer is traced, and its inputs alone are kept
for the backward pass. The loss is computed in chunks of the sequence, so that logits of one chunk exist at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training.accelerators import Accelerator
from training.batch import Signals
from training.config import TrainerConfig
from training.preflight.compiler import Program

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


class ScannedDecoder(torch.nn.Module):
    """Llama with stacked layers. Its parameters have no values."""

    def __init__(self, shape: dict[str, Any], split: Any, place: Any) -> None:
        """Builds the network. `split`: declares that a tensor (rows, ...) and its gradient are split by rows; `place`:
        (stacked parameter's name, shape, one layer's value) -> that value, declared with its gradient as it is placed,
        so that a gradient is summed on the device that needs it."""
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_utils import no_init_weights

        from training.models.torch.empty import parameters_without_values

        self.config = LlamaConfig(**{**shape, "num_hidden_layers": 1, "use_cache": False})
        self.config._attn_implementation = "eager"
        with no_init_weights(), parameters_without_values():
            network = LlamaForCausalLM(self.config).train()
        self.embedding, self.norm, self.head = network.model.embed_tokens, network.model.norm, network.lm_head
        self.rotary, self._layer = network.model.rotary_emb, [network.model.layers[0]]
        self._split, self._place = split, place
        self._stacked: dict[str, str] = {}  # the layer's name of each stacked parameter
        for name, value in self._layer[0].named_parameters():
            kind = f"vectors of {value.shape[0]} " if value.ndim == 1 else ""
            stacked = f"layers/{kind}{name.replace('.', '-')}"
            self._stacked[stacked] = name
            value = torch.empty(shape["num_hidden_layers"], *value.shape, device="meta")
            self.register_parameter(stacked, torch.nn.Parameter(value))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns hidden states, (rows, tokens, width)."""
        import torch._functorch.config as functorch
        import torch_xla.experimental.scan as scanning
        from functorch.compile import min_cut_rematerialization_partition

        scanning.shard_as = lambda first, second: (first, second)  # it needs torchax; every tensor is declared here
        functorch.activation_memory_budget = 0.0  # keep the inputs of a layer alone
        length, device, layer = ids.shape[1], ids.device, self._layer[0]
        hidden = self._split(self.embedding(ids).to(torch.bfloat16))
        positions = torch.arange(length, device=device).unsqueeze(0)
        cosines, sines = self.rotary(hidden, positions)

        def run_layer(carry: Any, parameters: dict[str, Tensor]) -> Any:
            before, cosines, sines = carry  # what is carried is kept once a layer, so the mask is made in each
            mask = torch.full((length, length), float("-inf"), device=device, dtype=before.dtype).triu(1)[None, None]
            named = {
                self._stacked[name]: self._place(name, tuple(getattr(self, name).shape), value)
                for name, value in parameters.items()
            }
            kept = {"attention_mask": mask, "position_embeddings": (cosines, sines)}
            after = torch.func.functional_call(layer, named, (before,), kept)
            after = after[0] if isinstance(after, tuple) else after
            return (self._split(after.to(before.dtype)), cosines, sines), None

        stacked = {name: getattr(self, name) for name in self._stacked}
        carry = (hidden, cosines, sines)
        (hidden, *_), _ = scanning.scan(run_layer, carry, stacked, partition_fn=min_cut_rematerialization_partition)
        return self.norm(self._split(hidden))


def causal_sums(network: ScannedDecoder, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Returns (3,): loss of the next token, tokens, hits (not counted), over the rows."""
    import torch_xla.core.xla_model as xm

    from training.models.torch.attention import recompute

    ids = batch["input_ids"].long()
    hidden, targets = network(ids), ids.roll(-1, 1)

    def loss_of(part: Tensor, wanted: Tensor) -> Tensor:
        logits = network.head(part).float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, wanted.flatten(), reduction="sum")

    chunks = zip(hidden.chunk(8, 1), targets.chunk(8, 1), strict=True)
    weights = (network.head.weight,)
    losses = [
        recompute(lambda part, wanted=wanted: loss_of(part, wanted), (part,), xm.optimization_barrier_, weights)
        for part, wanted in chunks
    ]
    loss = torch.stack(losses).sum()
    count = torch.ones_like(loss) * ids.numel()
    return torch.stack([loss, count, torch.zeros_like(loss)]), None


def trace_decoder(config: TrainerConfig, shape: dict[str, Any], target: Accelerator, length: int) -> Program:
    """Traces the trainer's step on a decoder, in bf16, for all devices of a slice, with the mesh of `config`."""
    import numpy as np
    import torch_xla.distributed.spmd as spmd

    from training.backends.torch.step import TrainingStep
    from training.backends.torch_xla import internals, tracing
    from training.backends.torch_xla.sharding import DataParallel
    from training.backends.torch_xla.state import State
    from training.distributed.cluster import Cluster
    from training.registry import OPTIMIZERS, load

    internals.simulate_devices(target.devices)
    cluster = Cluster(0, ("localhost",))
    sharding = DataParallel(cluster, config.train.mesh.fsdp)
    rows = spmd.Mesh(np.arange(target.devices), (target.devices,), ("rows",))
    grid = spmd.Mesh(np.arange(target.devices), tuple(sharding.mesh_shape.values()), tuple(sharding.mesh_shape))
    declare_both = spmd.xla_sharding.mark_sharding_with_gradients

    def split(value: Tensor) -> Tensor:
        return declare_both(value, rows, ("rows", *[None] * (value.ndim - 1)))

    def place(name: str, stacked: tuple[int, ...], value: Tensor) -> Tensor:
        axes = sharding.place(f"model/{name}", stacked)[1:]
        return declare_both(value, grid, axes) if any(axes) else value

    state = State(ScannedDecoder(shape, split, place), load(OPTIMIZERS["adamw"].torch), config.train, None)
    step = TrainingStep(config, cluster, state, sharding, causal_sums)
    state.upload(sharding)
    batch = {"input_ids": np.zeros((config.train.global_batch_size, length), np.int32)}
    inputs = step.inputs(0, batch, Signals())
    sent = inputs.with_leaves(sharding.send(inputs.leaves()))
    buffers = state.buffers()
    names = tracing.buffer_names(buffers, are_placeholders=True)
    shardings = {name: sharding.describe(name, tuple(value.shape)) for name, value in buffers.items()}

    def declare(tensor: Tensor) -> None:
        if name := state.undeclared.pop(id(tensor), None):
            sharding.declare_state({name: tensor})

    with tracing.forbid_data_dependence(), tracing.WatchMutations(declare), state.recording(changes=True):
        report = step.trace(0, sent)
    return tracing.extract_program([*state.buffers().values(), report], names, shardings)
