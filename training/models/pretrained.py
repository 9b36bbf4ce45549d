"""Where a pretrained model is: `model.path` may be a folder, a folder in a bucket, or the name of a model on the Hugging Face Hub.

A name has the form org/name, and is one only where there is no folder of that path. Each host downloads the model once, to the Hub's own cache (HF_HOME);
HF_TOKEN opens private ones, HF_ENDPOINT leads to a mirror. Only the configuration and the safetensors weights are taken. Framework-free.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from training.errors import BadInput

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TAKEN = ["config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]


def is_on_hub(path: str) -> bool:
    """Whether `path` is the name of a model on the Hub."""
    return bool(_NAME.fullmatch(path)) and not Path(path).exists()


@functools.cache
def folder_of(path: str) -> str:
    """The folder that `path` means: a name's is downloaded. Raises BadInput when the Hub does not give it."""
    if not is_on_hub(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        folder: str = snapshot_download(path, allow_patterns=_TAKEN)
    except (OSError, ValueError) as error:  # the library's own errors are OSErrors
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BadInput(
            f"model.path {path}: there is no such folder, and the Hub did not give a model of that name: {reason.strip()} "
            "Where hosts can't reach the Hub, download the model elsewhere and give its folder (local or gs://)"
        ) from None
    return folder
