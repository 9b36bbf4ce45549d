"""Small datasets of documents and the configuration of a tiny Llama over them, for tests that train decoders."""

from pathlib import Path
from typing import Any

from tests.container import small_runs
from training.data.prepare.make_datasets import DatasetOptions, make_datasets

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}  # fmt: skip


def shards(folder: Path, corpus: Path | str, **options: Any) -> None:
    """`tpu-train shards --task causal-lm`, with rows of 32 tokens and the tokenizer in the folder."""
    values = {"tokenizer": str(folder / "tokenizer"), "out": str(folder), "sequence_length": 32, **options}
    list(make_datasets(DatasetOptions(corpus=str(corpus), task="causal-lm", **values)))


def prepare(folder: Path) -> Path:
    """Documents that count on by a step of their own, of 3 to 20 tokens."""
    small_runs.write_tokenizer(folder / "tokenizer")
    documents = [
        " ".join(f"w{(start + step * index) % 40}" for index in range(3 + (start * 7 + step) % 18))
        for start in range(40)
        for step in (1, 2, 3)
    ]
    corpus = folder / "documents.txt"
    corpus.write_text("\n\n".join(documents))
    shards(folder, corpus, evaluation_percent=15.0)
    return folder


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as a plain value; `changes` as for `small_runs.document`."""
    own = {"task": "causal-lm", "model": {"config": LLAMA}, "train__steps": 8, "train__dropout": None}
    return small_runs.document(folder, **{**own, **changes})
