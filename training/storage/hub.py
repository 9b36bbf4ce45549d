"""Folders that are named and not placed: `model.path` and `data.tokenizer` may be a folder, a folder in a bucket, or a
name on the Hugging Face Hub.

A name has the form org/name, and is one only where there is no folder of that path. Each host downloads what it needs
once, to the Hub's own cache (HF_HOME); HF_TOKEN opens private ones, HF_ENDPOINT leads to a mirror. Of weights only
safetensors are taken. Framework-free.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from training.errors import BadInput

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_MODEL = ("config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json", *_TOKENIZER)


def is_on_hub(path: str) -> bool:
    """Whether `path` is a name on the Hub."""
    return bool(_NAME.fullmatch(path)) and not Path(path).exists()


def model_folder(path: str) -> str:
    """The folder that a model's `path` means: a name's is downloaded. Raises BadInput when the Hub does not give it."""
    return _folder(path, "model.path", "model", _MODEL)


def tokenizer_folder(path: str) -> str:
    """The same for a tokenizer, whose model is not downloaded."""
    return _folder(path, "data.tokenizer", "tokenizer", _TOKENIZER)


@functools.cache
def _folder(path: str, setting: str, what: str, files: tuple[str, ...]) -> str:
    if not is_on_hub(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        folder: str = snapshot_download(path, allow_patterns=list(files))
    except (OSError, ValueError) as error:  # the library's own errors are OSErrors
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BadInput(
            f"{setting} {path}: there is no such folder, and the Hub did not give a {what} of that name: {reason.strip()} "
            f"Where hosts can't reach the Hub, download the {what} elsewhere and give its folder (local or gs://)"
        ) from None
    return folder
