"""Claims about tokenizer folders: what is no tokenizer is refused with its URL, before any framework sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.data import tokenizer as tokenizers
from training.data.formats.open_dataset import _read_tokenizer_hash
from training.errors import BadInput

GOOD: dict[str, Any] = {
    "added_tokens": [
        {"id": 0, "content": "<pad>", "special": True},
        {"id": 1, "content": "[MASK]", "special": True},
    ],
    "model": {"type": "WordLevel", "vocab": {"<pad>": 0, "[MASK]": 1, "word": 2}, "unk_token": "<pad>"},
}


def folder_with(folder: Path, content: bytes) -> str:
    (folder / "tokenizer.json").write_bytes(content)
    return str(folder)


def test_a_tokenizer_says_its_special_tokens_and_its_vocabulary(tmp_path: Path) -> None:
    read = tokenizers.read(folder_with(tmp_path, json.dumps(GOOD).encode()))
    assert (read.special.pad, read.special.mask, read.special.vocabulary) == (0, 1, 3)


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
