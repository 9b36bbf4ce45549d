"""AdamW for torch tensors on any device."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from training.optim.adamw import STATE, AdamWSettings, bias_corrections, is_decayed


class AdamWTorch:
    """The moments of all parameters, and the update."""

    def __init__(self, settings: AdamWSettings, parameters: Mapping[str, Tensor]) -> None:
        """Creates moments of zero on the parameters' device. `parameters`: by PyTorch's names, fp32."""
        self._settings = settings
        self._moments = [
            {name: torch.zeros_like(value, requires_grad=False) for name, value in parameters.items()} for _ in STATE
        ]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Returns the moments by group ("adam_m", "adam_v") and by the parameter's name."""
        return dict(zip(STATE, self._moments, strict=True))

    def move_state(self, move: Callable[[str, Tensor], Tensor]) -> None:
        """Replaces each moment by `move(name, moment)`, for example by a copy on a device; names are "adam_m/..."."""
        named = self.state().items()
        self._moments = [{name: move(f"{group}/{name}", value) for name, value in of.items()} for group, of in named]

    def step_scalars(self, step: int) -> tuple[float, ...]:
        """Returns both bias corrections of step number `step`, counted from 0. `update` takes them as data, beside the
        learning rate, so that one program serves all steps."""
        return bias_corrections(self._settings, step)

    def update(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Sequence[Tensor],
        scale: Tensor,
        rate: Tensor,
        correction1: Tensor,
        correction2: Tensor,
    ) -> None:
        """Changes parameters and moments in place.

        Args:
            parameters: by name, fp32.
            gradients: in the order of the parameters; each is multiplied by `scale` before it is used.
            scale: scalar, the mean over the batch and clipping in one factor.
            rate: scalar, the learning rate. The corrections, scalars too, are those of `step_scalars`.
        """
        settings = self._settings
        first, second = self._moments
        for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
            gradient = gradient * scale
            first[name].mul_(settings.adam_beta1).add_(gradient, alpha=1 - settings.adam_beta1)
            second[name].mul_(settings.adam_beta2).addcmul_(gradient, gradient, value=1 - settings.adam_beta2)
            update = (first[name] / correction1) / ((second[name] / correction2).sqrt() + settings.adam_epsilon)
            if is_decayed(name, value.shape):
                update = update + settings.weight_decay * value
            value.sub_(rate * update)
