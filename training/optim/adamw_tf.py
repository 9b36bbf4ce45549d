"""AdamW for TensorFlow variables, under any tf.distribute strategy."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from training.optim.adamw import STATE, AdamWSettings, bias_corrections, is_decayed


class AdamWTensorFlow:
    """The moments of all parameters, and the update."""

    def __init__(self, settings: AdamWSettings, names: Sequence[str], variables: Sequence[Any]) -> None:
        """Creates moments of zero, in the strategy's scope. `names`: PyTorch's, of the trainable fp32 `variables`."""
        self._settings, self._variables = settings, list(variables)
        self._decayed = [is_decayed(name, value.shape) for name, value in zip(names, variables, strict=True)]
        self._moments = [[tf.Variable(tf.zeros_like(value), trainable=False) for value in variables] for _ in STATE]

    def state(self) -> dict[str, list[Any]]:
        """Returns the moments' variables by group ("adam_m", "adam_v"), in the order of the parameters."""
        return dict(zip(STATE, self._moments, strict=True))

    def step_scalars(self, step: int) -> tuple[float, ...]:
        """Returns both bias corrections of step number `step`, counted from 0. `update` takes them as data, beside the
        learning rate, so that one program serves all steps."""
        return bias_corrections(self._settings, step)

    def update(self, gradients: Sequence[Any], scale: Any, *scalars: Any) -> None:
        """Changes variables and moments in place. Call it in a replica's context.

        Args:
            gradients: summed over replicas, in the order of the variables, before `scale` multiplies them.
            scale: scalar, the mean over the batch and clipping in one factor.
            *scalars: the learning rate, then those of `step_scalars`; scalars too.
        """

        def update_all(strategy: Any, gradients: Sequence[Any], *scalars: Any) -> None:
            for value, decayed, first, second, gradient in zip(
                self._variables, self._decayed, *self._moments, gradients, strict=True
            ):
                strategy.extended.update(value, self._update_rule(decayed), args=(first, second, gradient, *scalars))

        tf.distribute.get_replica_context().merge_call(update_all, args=(gradients, scale, *scalars))

    def _update_rule(self, decayed: bool) -> Callable[..., None]:
        """Returns a function of a variable, its two moments, its gradient, and `update`'s scale and scalars. It changes
        variable and moments in place on one device, with weight decay if `decayed`."""
        settings = self._settings
        decay = settings.weight_decay if decayed else 0.0

        def update(
            value: Any,
            first: Any,
            second: Any,
            gradient: Any,
            scale: Any,
            rate: Any,
            correction1: Any,
            correction2: Any,
        ) -> None:
            gradient = gradient * scale
            m = first.assign(settings.adam_beta1 * first + (1 - settings.adam_beta1) * gradient)
            v = second.assign(settings.adam_beta2 * second + (1 - settings.adam_beta2) * gradient * gradient)
            step = (m / correction1) / (tf.sqrt(v / correction2) + settings.adam_epsilon)
            value.assign_sub(rate * (step + decay * value))

        return update
