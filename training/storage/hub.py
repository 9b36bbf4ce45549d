"""Downloads from the Hugging Face Hub: `model.path` and `data.tokenizer` may be a local folder, a folder in a bucket,
or a name on the Hub.

A name has the form ORGANISATION/NAME; an existing folder of that path has precedence. Each host downloads the files
once, to the Hub's own cache (HF_HOME); HF_TOKEN gives access to private ones, HF_ENDPOINT names a mirror. Weights are
downloaded only as safetensors. Framework-free.
"""

import contextlib
import functools
import re
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from training import storage
from training.errors import BadInput

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
GENERATION = "generation_config.json"  # how a decoder's text ends and is sampled
MODEL_FILES = ("config.json", GENERATION, *_WEIGHTS, *TOKENIZER_FILES)


def is_on_hub(path: str) -> bool:
    """Returns whether `path` has the form of a name on the Hub and does not exist here; does not ask the Hub."""
    return bool(_NAME.fullmatch(path)) and not Path(path).exists()


def model_folder(path: str) -> str:
    """Returns the folder to which it downloads the Hub's model named `path`; a path that exists, or is no OWNER/NAME
    (gs://), as it is, unchecked. Raises BadInput if the Hub gives none."""
    return _folder(path, "model.path", "model", MODEL_FILES)


def tokenizer_folder(path: str) -> str:
    """Returns the folder of a tokenizer, like `model_folder`; downloads the tokenizer's files only."""
    return _folder(path, "data.tokenizer", "tokenizer", TOKENIZER_FILES)


@contextlib.contextmanager
def local_copy(folder: str, files: tuple[str, ...] = MODEL_FILES) -> Iterator[str]:
    """Yields a local model folder: `folder` itself, unchecked; for a name on the Hub, the cache to which it downloads
    the model; for a bucket, a copy of those of its `files` (patterns) that exist, deleted after the block. Raises
    BadInput, StorageError."""
    folder = model_folder(folder)
    if not storage.is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        for stat in storage.files(folder):
            name = storage.name_of(stat.url)
            if any(fnmatch(name, pattern) for pattern in files):
                storage.download(stat.url, Path(scratch) / name)
        yield scratch


@functools.cache
def _folder(path: str, setting: str, kind: str, files: tuple[str, ...]) -> str:
    """Downloads what there is of `files` (patterns) for a name on the Hub, OWNER/NAME, once per process, and returns
    their folder; returns any other path, and one that exists, as it is. Raises BadInput, whose message uses `setting`
    and `kind`, when the Hub does not give them."""
    if not is_on_hub(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        folder: str = snapshot_download(path, allow_patterns=list(files))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeErrors are of its hf_xet
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BadInput(
            f"{setting} {path}: there is no such folder, and the Hub did not give a {kind} of that name: "
            f"{reason.strip()} Where hosts can't reach the Hub, download the {kind} elsewhere and give its folder "
            "(local or gs://)"
        ) from None
    return folder
