"""Claims about tokenizer folders: what is no tokenizer is refused with its URL, before any framework sees it."""

import json
from pathlib import Path
from typing import Any

import pytest

from training import storage
from training.checkpoint.snapshot import Snapshot
from training.data import tokenizer as tokenizers
from training.data.formats.dataset import _read_tokenizer_hash
from training.errors import BadInput
from training.models.export import write_model_folder
from training.models.hugging_face import local_copy

GOOD: dict[str, Any] = {
    "added_tokens": [{"id": 0, "content": "<pad>", "special": True}, {"id": 1, "content": "[MASK]", "special": True}],
    "model": {"type": "WordLevel", "vocab": {"<pad>": 0, "[MASK]": 1, "word": 2}, "unk_token": "<pad>"},
}


def folder_with(folder: Path, content: bytes) -> str:
    (folder / "tokenizer.json").write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe{", b"[" * 200_000, b'{"a":' * 100_000, b'{"model": {}}',
        b'{"model": {"vocab": 5}}', b'{"model": {"vocab": []}}', b'{"model": {"vocab": {"a": "b"}}}', b"9" * 5000,
        json.dumps({**GOOD, "added_tokens": 5}).encode(), json.dumps({**GOOD, "added_tokens": [5]}).encode(),
        json.dumps({**GOOD, "added_tokens": [{"id": [], "content": [], "special": True}]}).encode(),
        json.dumps({**GOOD, "model": {"vocab": {"word": -1}}}).encode(),
        json.dumps({**GOOD, "model": {"vocab": {"word": 1e300}}}).encode(),
        json.dumps({**GOOD, "model": {"vocab": {"word": 2**40}}}).encode(),
        json.dumps({**GOOD, "model": {"vocab": {"word": True}}}).encode(),
        json.dumps(GOOD).encode("utf-16"),
    ],
)  # fmt: skip
def test_what_is_no_tokenizer_is_refused_with_its_url(tmp_path: Path, content: bytes) -> None:
    url = folder_with(tmp_path, content)
    with pytest.raises(BadInput, match=f"^{url}/tokenizer.json is not a tokenizer of the `tokenizers` library: "):
        tokenizers.read(url)


@pytest.mark.parametrize("content", [b"[" * 200_000, b"[]", b"{", b"\xff", b"null"])
def test_the_launcher_refuses_the_same_before_a_slice_exists(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadInput, match="is not a tokenizer of the `tokenizers` library"):
        _read_tokenizer_hash(folder_with(tmp_path, content))


def test_only_tokenizer_and_model_of_a_trainers_checkpoint_folder_are_copied(tmp_path: Path, gcs: object) -> None:
    """transformers' Trainer leaves its own state beside the model, and older checkpoints below it."""
    model, tokenizer = ("config.json", "model.safetensors"), ("tokenizer.json", "vocab.txt")
    for name in (*model, *tokenizer, "optimizer.pt", "rng_state.pth", "checkpoint-1/model.safetensors"):
        storage.write(f"gs://bucket/trainer/{name}", name.encode())
    fetched = tokenizers.fetch("gs://bucket/trainer", tmp_path / "fetched")
    write_model_folder(str(tmp_path / "export"), {}, lambda _: Snapshot(()), {}, "gs://bucket/trainer")
    with local_copy("gs://bucket/trainer") as copy:
        found = {file.name: file.read_text() for file in Path(copy).iterdir()}
    assert found == {name: name for name in (*model, *tokenizer)}
    assert {file.name for file in fetched.iterdir()} == set(tokenizer)
    assert {file.name for file in (tmp_path / "export").iterdir()} == {*model, *tokenizer}
