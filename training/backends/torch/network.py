"""The network of a run, for every runtime of PyTorch."""

from typing import Any

from training.config import Remat, TrainerConfig
from training.models.hugging_face import ModelRequirements
from training.models.torch.attention import Barrier
from training.models.torch.dropout import DropoutNoise
from training.models.torch.empty import build_empty
from training.models.torch.layer_scan import Loop
from training.models.torch.long_attention import Kernel, choose_attention, loop_in_python
from training.models.torch.lora import add_lora, freeze
from training.models.torch.network import build, patch_modules


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
    """Returns the network on the host, with the run's attention, dropout, adapters and frozen weights, and the random
    numbers of its dropouts; None outside BERT's family. `remat`: unless train.remat is given; `barrier`: as for
    `patch_modules`; `loop`, `kernel`: as for `choose_attention`; `only_traces`: leaves out weights if it can. Raises
    BadInput if weights are absent, or model, data, adapter and `train` do not fit together."""
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
