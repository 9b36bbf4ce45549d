"""What a trained model answers: plain torch and transformers, no XLA."""

from __future__ import annotations

import os
from dataclasses import dataclass

from training import storage
from training.errors import BadInput
from training.hugging_face import WEIGHTS, local


@dataclass(frozen=True)
class Answer:
    score: float  # probability
    token: str
    text: str  # the whole text with the answer in it


def fill_mask(folder: str, text: str, top: int) -> list[Answer]:
    """The likeliest tokens for the one mask in `text`, best first. Raises BadInput."""
    if storage.stat(storage.join(folder, WEIGHTS)) is None:
        raise BadInput(f"{folder} is not a model folder: it has no {WEIGHTS}. `tpu-train export RUN {folder}` writes one")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import pipeline

    with local(folder) as here:
        filler = pipeline("fill-mask", model=here, framework="pt", device="cpu")
        mask = filler.tokenizer.mask_token
        if text.count(mask) != 1:
            raise BadInput(f"the text must hold {mask} exactly once, not {text.count(mask)} times: {text!r}")
        return [Answer(answer["score"], answer["token_str"], answer["sequence"]) for answer in filler(text, top_k=top)]
