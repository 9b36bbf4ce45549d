"""Predictions of a trained model on the CPU, by transformers' pipelines over torch or, if torch is not installed, over
TensorFlow."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from training import storage
from training.errors import BadInput
from training.models.hugging_face import ADAPTER_CONFIG, WEIGHTS, has_weights, read_config, usable_positions
from training.registry import BACKENDS, TASKS, load, task_of_model
from training.storage.hub import local_copy, model_folder


@dataclass(frozen=True)
class MaskPrediction:
    """A token for the mask of a text."""

    score: float  # probability
    token: str
    text: str  # the whole text with the answer in it


@dataclass(frozen=True)
class ClassPrediction:
    """A class of a text, or of neighbouring words of it."""

    score: float  # probability
    name: str
    words: str = ""  # "": the whole text


def pipeline_of(folder: str) -> str:
    """Returns the name of transformers' pipeline for a model folder's task. Raises BadInput without weights or a good
    config.json; StorageError."""
    _require_model(folder)
    return TASKS[task_of_model(read_config(folder))].head.pipeline


def go_on(folder: str, text: str, tokens: int = 40) -> str:
    """Returns `text` and at most `tokens` more, each the most probable one, as far as there are positions. Raises
    BadInput for a longer text, StorageError, and transformers' own errors, as for a folder without weights."""
    with local_copy(folder) as local_folder:
        generator = open_pipeline("text-generation", local_folder)
        tokens = min(tokens, _require_fits(generator, text) + 1)
        return str(generator(text, max_new_tokens=tokens, do_sample=False)[0]["generated_text"])


def fill_mask(folder: str, text: str, top: int) -> list[MaskPrediction]:
    """Returns the `top` most probable tokens for the mask, or all there are, best first. Raises BadInput without
    weights, for a text longer than the model's positions, or unless it has exactly one mask; StorageError."""
    _require_model(folder)
    with local_copy(folder) as local_folder:
        filler = open_pipeline("fill-mask", local_folder)
        mask = filler.tokenizer.mask_token
        if text.count(mask) != 1:
            raise BadInput(f"the text must hold {mask} exactly once, not {text.count(mask)} times: {text!r}")
        _require_fits(filler, text)
        return [
            MaskPrediction(answer["score"], answer["token_str"], answer["sequence"])
            for answer in filler(text, top_k=min(top, filler.model.config.vocab_size))
        ]


def classify(folder: str, text: str, top: int, pair: str | None = None) -> list[ClassPrediction]:
    """Returns the `top` most probable classes of `text`, or of it and a second one, best first, and cuts what is longer
    than the model's positions. Raises BadInput without weights, StorageError."""
    _require_model(folder)
    with local_copy(folder) as local_folder:
        classifier = open_pipeline("text-classification", local_folder)
        given = text if pair is None else {"text": text, "text_pair": pair}
        answers = classifier(given, top_k=top, truncation=True, max_length=_longest(classifier))
        return [ClassPrediction(answer["score"], answer["label"]) for answer in answers]


def label_words(folder: str, text: str) -> list[ClassPrediction]:
    """Returns the parts of `text` that have a label other than O, in order, with the label of each one's first token,
    without its B- or I-; neighbours of one entity are one part. Raises BadInput for a text longer than the model's
    positions; StorageError; and transformers' own errors, as for a folder without weights."""
    with local_copy(folder) as local_folder:
        labeller = open_pipeline("token-classification", local_folder)
        _require_fits(labeller, text)
        answers = labeller(text, aggregation_strategy="first")
        return [ClassPrediction(answer["score"], answer["entity_group"], answer["word"]) for answer in answers]


def open_pipeline(name: str, folder: str) -> Any:
    """Returns `transformers.pipeline(name)` over a local model folder, on the CPU, with the first registered framework
    that is installed. Raises BadInput if none is."""
    for entry in BACKENDS.values():
        if importlib.util.find_spec(entry.inference_requires) is not None:
            return load(entry.open_pipeline)(name, folder)
    frameworks = " or ".join(dict.fromkeys(entry.inference_requires for entry in BACKENDS.values()))
    raise BadInput(f"a prediction needs {frameworks}, and neither is installed here: run in the image of a backend")


def _longest(pipeline: Any) -> int | None:
    """Returns how many tokens a text may have, special ones too, for the model of a pipeline; None: any number."""
    network = pipeline.model.config
    return usable_positions(network.model_type, getattr(network, "max_position_embeddings", None), network.pad_token_id)


def _require_fits(pipeline: Any, text: str) -> int:
    """Returns how many positions of a pipeline's model a text leaves. Raises BadInput for one of more tokens."""
    tokens, longest = len(pipeline.tokenizer(text)["input_ids"]), _longest(pipeline) or 1 << 31
    if tokens > longest:
        raise BadInput(f"the text has {tokens} tokens, and the model has {longest} positions: give a shorter text")
    return longest - tokens


def _require_model(folder: str) -> None:
    """Raises BadInput unless the folder, local, in a bucket or downloaded from the Hub, has weights. Sets
    TRANSFORMERS_VERBOSITY to error, unless it is set."""
    local_folder = model_folder(folder)
    if not has_weights(local_folder):
        if storage.stat(storage.join(local_folder, ADAPTER_CONFIG)):
            raise BadInput(f"{folder} has a LoRA adapter alone: set lora.merge for a whole model, or load it with peft")
        raise BadInput(
            f"{folder} is not a model folder: it has no {WEIGHTS}. `tpu-train export RUN {folder}` writes one"
        )
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
