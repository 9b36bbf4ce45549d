"""The network of a run, and its state on the host: the parameters and the optimizer's tensors, by their names in a
checkpoint. For every runtime of PyTorch."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from training.checkpoint.tensors import Damaged, TensorSpec
from training.config import Remat, TrainerConfig
from training.models.hugging_face import ModelRequirements
from training.models.torch.attention import Barrier
from training.models.torch.dropout import DropoutNoise
from training.models.torch.layer_scan import Loop
from training.models.torch.long_attention import Kernel, choose_attention, loop_in_python
from training.models.torch.lora import add_lora, freeze
from training.models.torch.network import build, build_empty, patch_modules


def build_network(
    config: TrainerConfig,
    requirements: ModelRequirements,
    *,
    remat: Remat,
    barrier: Barrier,
    only_traces: bool = False,
    loop: Loop = loop_in_python,
    kernel: Kernel | str = "the backend has no kernel",
) -> tuple[Any, DropoutNoise | None]:
    """Returns the network on the host, with the run's attention, dropout, adapters and frozen weights, and what its
    dropouts draw from (None if it keeps its own). Downloads a model of the Hub. `remat`: unless train.remat is given;
    `barrier`: as for `patch_modules`; `loop`, `kernel`: as for `choose_attention`; `only_traces`: leaves out weights if
    it can. Raises BadInput if weights are absent, or model, data, adapter and `train` do not fit together;
    StorageError."""
    dropout = config.train.dropout
    network: Any = build_empty(config.model, requirements, dropout=dropout) if only_traces else None
    network = network or build(config.model, requirements, dropout=dropout, seed=config.seed)
    network.attention_note = choose_attention(
        network, config.train.attention, requirements.sequence_length, loop=loop, kernel=kernel
    )
    noise = patch_modules(network, config.train.remat, default=remat, barrier=barrier)
    if config.lora:
        add_lora(network, config.lora, config.seed, has_fresh_head=requirements.head.is_fresh)
    freeze(network, config.train.freeze)
    network.label_smoothing = config.train.label_smoothing
    return network, noise


def no_place(name: str, spec: TensorSpec) -> Damaged:
    """Returns the error about a tensor of a checkpoint that the state lacks, or has in another type or shape."""
    return Damaged(f"tensor {name} is {spec.dtype} {list(spec.shape)}, which has no place in this model")


class HostState:
    """A network, its optimizer's tensors, and the table that its dropouts draw from."""

    def __init__(
        self,
        network: Any,
        optimizer_class: Any,
        settings: Any,
        noise: DropoutNoise | None,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """Makes the optimizer; its state and the network stay on the host. `network`: in training mode;
        `optimizer_class`: of training.registry.OPTIMIZERS, with its `settings`; `noise`: of the network's dropouts, as
        `patch_modules` returns it; `shapes`: of the whole parameters, by name, where the network has slices."""
        self.network, self.noise = network, noise
        self.name_parameters()
        self.optimizer = optimizer_class(settings, self.trained)
        self.is_uploaded = False
        whole = {name: shapes.get(name.partition("/")[2], tuple(value.shape)) for name, value in self.tensors().items()}
        self._specs = {name: TensorSpec("F32", shape, 4 * math.prod(shape)) for name, shape in whole.items()}

    def name_parameters(self) -> None:
        """Sets `parameters`, all of the network by name, and `trained`, those with gradients. Call it again after its
        parameters were moved."""
        self.parameters: dict[str, Tensor] = dict(self.network.named_parameters())  # tied ones once
        self.trained = {name: value for name, value in self.parameters.items() if value.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors of the state, no copies, by their names in a checkpoint. On torch_xla's devices, read and
        change them within `State.recording` only."""
        groups = {"model": self.parameters, **self.optimizer.state()}
        return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return dict(self._specs)

    def load(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Overwrites tensors, or the slices that the network has, with these values, before the state is on a device.
        Raises Damaged for an unknown name, type or shape: tensors named before it are changed then."""
        assert not self.is_uploaded, "restore before the first step"
        current = self.tensors()
        for name, (spec, data) in tensors.items():
            if name not in current or (spec.dtype, spec.shape) != ("F32", tuple(current[name].shape)):
                raise no_place(name, spec)
            # By numpy: a copy by torch waits for all of its threads, each of which may have to wait for a busy
            # processor.
            current[name].detach().numpy()[...] = np.frombuffer(data, np.float32).reshape(spec.shape)
