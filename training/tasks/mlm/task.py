"""Masked language modelling: the figures of predictions at hidden positions."""

import math

from training.batch import StepResult
from training.tasks.packed_rows import MaskedRows


class MaskedLanguageModeling(MaskedRows):
    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns loss, perplexity and accuracy, as `token_figures`."""
        return token_figures(total)


def token_figures(total: StepResult) -> dict[str, float]:
    """Returns the loss, the perplexity (inf for a loss from 700 on) and the accuracy (nan without predictions)."""
    weight = total.sums["weight"] or float("nan")
    perplexity = math.inf if total.loss >= 700 else math.exp(total.loss)  # exp overflows above 709
    return {"loss": total.loss, "perplexity": perplexity, "accuracy": total.sums["correct"] / weight}
