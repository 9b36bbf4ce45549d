"""Causal language modelling: the figures of predictions of the next token."""

from training.batch import StepResult
from training.tasks.mlm.task import token_figures
from training.tasks.packed_rows import DocumentRows


class CausalLanguageModeling(DocumentRows):
    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns loss, perplexity and accuracy, as `token_figures`."""
        return token_figures(total)
