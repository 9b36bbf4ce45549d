"""AdamW (https://arxiv.org/abs/1711.05101): settings and arithmetic that the frameworks' halves share.

The halves, `adamw_torch` and `adamw_tf`, keep two moments for each parameter, in fp32 and of the parameter's shape,
under the names in `STATE`; checkpoints store them as `adam_m/<parameter>` and `adam_v/<parameter>`.
"""

from collections.abc import Sequence

from pydantic import Field

from training.optim import STACKED
from training.yaml_file import Section

STATE = ("adam_m", "adam_v")  # the running means of the gradient and of its square


class AdamWSettings(Section):
    """The part of section `train` that belongs to AdamW."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay, of matrices and embeddings: not of biases and norms."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment, against division by zero."""


def bias_corrections(settings: AdamWSettings, step: int) -> tuple[float, float]:
    """Returns the divisors of the two moments in step number `step`, counted from 0 (https://arxiv.org/abs/1412.6980,
    algorithm 1)."""
    return 1 - settings.adam_beta1 ** (step + 1), 1 - settings.adam_beta2 ** (step + 1)


def is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Returns whether weight decay applies to the parameter with this PyTorch name: not to biases and norms. `shape`:
    with an axis of layers if the name is that of stacked parameters."""
    return not name.endswith("bias") and len(shape) > (2 if STACKED in name else 1)
