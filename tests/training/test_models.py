"""Tokenizer and model folders, fresh weights, a model's own arithmetic and figures, and uploads to the Hub."""

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import google_crc32c
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from training import storage
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import TensorSpec, decode
from training.config import Hub, Lora, Model
from training.data import tokenizer as tokenizers
from training.data.formats.open_dataset import _read_tokenizer_hash
from training.errors import BadInput
from training.models.export import _are_turned, write_model_folder
from training.models.flops import WorkCounter, flops_per_row, mfu, peak_flops
from training.models.hub import BackgroundUploader, Push, find_result, push_model
from training.models.hugging_face import ModelRequirements, build_model_config, read_labels, usable_positions
from training.models.initial import initial_weight
from training.models.predict import pipeline_of
from training.registry import TASKS, task_of_model
from training.storage.hub import TOKENIZER_FILES, local_copy
from training.tasks.labels import accuracy, check_labels, pearson, weighted_f1

EMBEDDING = "bert.embeddings.word_embeddings.weight"
BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "vocab_size": 30522}


def test_the_numbers_are_these_wherever_they_are_made() -> None:
    """Pinned: images have numpy versions of their own, and a checkpoint's `seed` means these weights."""
    values, wider = (initial_weight("bert.pooler.dense.weight", (300, 200), seed=1, **given)
                     for given in ({}, {"deviation": 0.05}))  # fmt: skip
    assert google_crc32c.value(values.tobytes()) == 0x65E30AAF
    assert values.dtype == np.float32
    assert wider == pytest.approx(values / 0.02 * 0.05)


def test_biases_are_zero_norms_are_one_and_padding_is_zero() -> None:
    assert not initial_weight("cls.predictions.bias", (9,), seed=1).any()
    assert (initial_weight("bert.embeddings.LayerNorm.weight", (9,), seed=1) == 1).all()
    padded = initial_weight(EMBEDDING, (9, 4), seed=1, pad=3)
    assert not padded[3].any()
    assert np.array_equal(np.delete(padded, 3, 0), np.delete(initial_weight(EMBEDDING, (9, 4), seed=1), 3, 0))
    positions = "roberta.embeddings.position_embeddings.weight"
    assert not initial_weight(positions, (9, 4), seed=1, model_type="roberta", pad=1)[1].any()
    assert initial_weight(positions.replace("roberta", "bert"), (9, 4), seed=1, pad=1)[1].any()


def test_bert_base_costs_six_flops_a_weight_and_token_and_its_attention() -> None:
    """85 million weights in the layers; the head is a dense layer and the vocabulary, at 20 places of 128."""
    layers = 12 * (4 * 768**2 + 2 * 768 * 3072)
    expected = 128 * 6 * layers + 12 * 12 * 128 * 128 * 768 + 20 * 6 * (768**2 + 768 * 30522)
    assert flops_per_row(BERT_BASE, 128, 20) == pytest.approx(expected)
    assert flops_per_row({**BERT_BASE, "id2label": {"0": "a", "1": "b"}}, 128, None) < flops_per_row(BERT_BASE, 128, 20)


def test_work_counts_the_rows_of_all_hosts() -> None:
    work = WorkCounter(BERT_BASE, hosts=4)
    work.add({"input_ids": np.zeros((8, 128)), "positions": np.zeros((8, 20))})
    assert (work.tokens, work.flops) == (4 * 8 * 128, 32 * flops_per_row(BERT_BASE, 128, 20))


def test_mfu_is_told_on_known_tpus_only() -> None:
    assert peak_flops("v4-32", "TPU") == 16 * 275e12
    assert [peak_flops("v4-32", "CPU"), peak_flops(None, "TPU"), peak_flops("v99-8", "TPU")] == [None, None, None]
    assert mfu(275e12, 2.0, 275e12) == 0.5
    assert mfu(1.0, 1.0, None) is None
    assert flops_per_row({"dim": 768}, 128, 20) == 0.0  # a family that names its sizes otherwise
    assert mfu(0.0, 1.0, 275e12) is None


GOOD: dict[str, Any] = {
    "added_tokens": [{"id": 0, "content": "<pad>", "special": True}, {"id": 1, "content": "[MASK]", "special": True}],
    "model": {"type": "WordLevel", "vocab": {"<pad>": 0, "[MASK]": 1, "word": 2}, "unk_token": "<pad>"},
}
NO_OBJECTS = (b"[" * 200_000, b"[]", b"{", b"\xff\xfe{", b"null")
CHANGES: tuple[dict[str, Any], ...] = (
    {"added_tokens": 5}, {"added_tokens": [5]}, {"added_tokens": [{"id": [], "content": [], "special": True}]},
    *({"model": {"vocab": {"word": number}}} for number in (-1, 1e300, 2**40, True, "b")),
)  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        *NO_OBJECTS, b"", b"5", b'"x"', b'{"a":' * 100_000, b'{"model": {}}',
        b'{"model": {"vocab": 5}}', b'{"model": {"vocab": []}}', b"9" * 5000, json.dumps(GOOD).encode("utf-16"),
        *(json.dumps({**GOOD, **change}).encode() for change in CHANGES),
    ],
)  # fmt: skip
def test_what_is_no_tokenizer_is_refused_with_its_url(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadInput, match=f"^{tmp_path}/tokenizer.json is not a tokenizer of the `tokenizers` library: "):
        tokenizers.read(str(tmp_path))


@pytest.mark.parametrize("content", NO_OBJECTS)
def test_the_launcher_refuses_the_same_before_a_slice_exists(tmp_path: Path, content: bytes) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match="is not a tokenizer of the `tokenizers` library"):
        _read_tokenizer_hash(str(tmp_path))
    with pytest.raises(BadInput, match=r"tokenizer_config\.json is not a JSON object"):
        tokenizers.read(str(tmp_path), "documents")


def test_only_tokenizer_and_model_of_a_trainers_checkpoint_folder_are_copied(tmp_path: Path, gcs: object) -> None:
    """transformers' Trainer leaves its own state beside the model, and older checkpoints below it."""
    model, tokenizer = ("config.json", "model.safetensors"), ("tokenizer.json", "vocab.txt")
    for name in (*model, *tokenizer, "optimizer.pt", "rng_state.pth", "checkpoint-1/model.safetensors"):
        storage.write(f"gs://bucket/trainer/{name}", name.encode())
    write_model_folder(str(tmp_path / "export"), {}, lambda _: Snapshot(()), {}, "gs://bucket/trainer")
    with local_copy("gs://bucket/trainer") as copy, local_copy("gs://bucket/trainer", TOKENIZER_FILES) as fetched:
        found = {file.name: file.read_text() for file in Path(copy).iterdir()}
        assert {file.name for file in Path(fetched).iterdir()} == set(tokenizer)
    assert found == {name: name for name in (*model, *tokenizer)}
    assert {file.name for file in (tmp_path / "export").iterdir()} == {*model, *tokenizer}


def test_additions_to_a_head_are_merged_and_a_whole_model_replaces_its_adapter(tmp_path: Path) -> None:
    square, layers = TensorSpec("F32", (4, 4), 64), ("bert.layer", "bert.pooler.dense")
    weights = {f"model/{layer}.{part}weight": square for layer in layers for part in ("", "lora_A.", "lora_B.")}

    def snapshot(buffers: Any) -> Snapshot:
        for buffer in buffers.values():
            buffer[:] = np.ones(16, np.float32).tobytes()
        return Snapshot(())

    storage.write(f"{tmp_path}/start/generation_config.json", b"{}")
    start = Mock(path=f"{tmp_path}/start")
    run: Any = Mock(task="classification", lora=Lora(rank=4, alpha=4, merge=False), model=start)
    write_model_folder(str(tmp_path), weights, snapshot, {}, "t", run=run)
    stored = decode((tmp_path / "adapter_model.safetensors").read_bytes())
    first = {name[22:]: np.frombuffer(data, np.float32)[0] for name, (_, data) in stored.items()}
    assert first == {"layer.lora_A.weight": 1, "layer.lora_B.weight": 1, "pooler.dense.weight": 5}
    write_model_folder(str(tmp_path), weights, snapshot, {}, "t", run=run, merge=True)
    copied = {"start", "generation_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", *copied}
    assert _are_turned({"a.weight": Mock(shape=(4, 12)), "a.bias": Mock(shape=(12,)), "b.weight": square})


Pairs = Sequence[tuple[int, int]]  # true, predicted
CLASSES = 4
classes = st.integers(0, CLASSES - 1)


def confusion(pairs: Pairs) -> np.ndarray:
    counts = np.zeros((CLASSES, CLASSES))
    np.add.at(counts, tuple(np.array(pairs).T), 1)
    return counts


def naive_weighted_f1(pairs: Pairs) -> float:
    """By its definition: precision and recall of each class, one example at a time."""
    total = 0.0
    for label in range(CLASSES):
        true, predicted = sum(t == label for t, _ in pairs), sum(p == label for _, p in pairs)
        hits = sum(t == p == label for t, p in pairs)
        if hits:
            precision, recall = hits / predicted, hits / true
            total += true * 2 * precision * recall / (precision + recall)
    return total / len(pairs)


def test_a_perfect_classifier_has_1_and_no_examples_have_no_figure() -> None:
    assert (weighted_f1(np.diag([3.0, 0.0, 5.0])), accuracy(np.diag([3.0, 0.0, 5.0]))) == (1, 1)
    assert np.isnan([weighted_f1(np.zeros((2, 2))), accuracy(np.zeros((2, 2)))]).all()


@given(st.lists(st.tuples(classes, classes), min_size=1, max_size=40))
def test_figures_of_the_matrix_are_those_of_the_examples(pairs: Pairs) -> None:
    assert weighted_f1(confusion(pairs)) == pytest.approx(naive_weighted_f1(pairs))
    assert accuracy(confusion(pairs)) == pytest.approx(sum(t == p for t, p in pairs) / len(pairs))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_range_is_named_with_its_record(label: int) -> None:
    with pytest.raises(BadInput, match=f"^gs://b/train: record 12 has label {label}, which is none of 0 to 2: "):
        check_labels("gs://b/train", np.array([0, label, 2], np.int32), np.array([11, 12, 13]), 3)


@pytest.mark.parametrize(("family", "tokens"), [("bert", 514), ("roberta", 512), ("xlm-roberta", 512)])
def test_a_text_is_cut_where_the_familys_positions_end(family: str, tokens: int) -> None:
    assert usable_positions(family, 514, 1) == tokens


def test_a_prediction_takes_a_name_on_the_hub_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setitem(sys.modules, "huggingface_hub", Mock(snapshot_download=lambda name, **_: str(tmp_path)))
    assert pipeline_of("organisation/of-predict") == "text-generation"
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_config.json")
    with pytest.raises(BadInput, match=r"of-predict has a LoRA adapter alone: set lora\.merge"):
        pipeline_of("organisation/of-predict")
    monkeypatch.setitem(sys.modules, "huggingface_hub", Mock(snapshot_download=Mock(side_effect=RuntimeError("CAS"))))
    with pytest.raises(BadInput, match="the Hub did not give a model of that name: CAS"):
        pipeline_of("organisation/of-another")


def test_a_classifiers_config_names_its_labels_in_order() -> None:
    names = tuple(f"intent {number}" for number in range(12))
    requirements = ModelRequirements(100, 0, 8, TASKS["classification"].head, names)
    config = build_model_config(Model(name="bert-tiny"), requirements, dropout=None)
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.1, "unless train.dropout is set"
    assert read_labels(config) == [*names]


values = st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=40)


def totals(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    products = (predictions * predictions, labels * labels, predictions * labels)
    return np.array([predictions.sum(), labels.sum(), *(product.sum() for product in products)])


@given(values)
def test_pearson_is_numpys(pairs: list[tuple[float, float]]) -> None:
    predictions, labels = np.array(pairs).T
    assume(predictions.std() > 0.01 and labels.std() > 0.01)
    expected = np.corrcoef(predictions, labels)[0, 1]
    assert pearson(len(pairs), totals(predictions, labels)) == pytest.approx(expected, abs=1e-6)


def test_constant_predictions_are_not_correlated_with_anything() -> None:
    assert pearson(3, totals(np.ones(3), np.arange(3.0))) == 0
    assert pearson(0, np.zeros(5)) == 0
    assert np.isnan(pearson(3, np.array([1.0, 1.0, np.inf, 1.0, np.inf])))


@pytest.mark.parametrize(
    ("network", "problem_type", "task"),
    [
        *((entry.head.network, entry.head.problem_type, task) for task, entry in TASKS.items()),
        ("ForSequenceClassification", None, "classification"),  # of others
        ("Model", None, "mlm"),
    ],
)
def test_a_models_configuration_says_which_task_it_is_for(network: str, problem_type: str | None, task: str) -> None:
    assert task_of_model({"architectures": [f"Bert{network}"], "problem_type": problem_type}) == task


STOP = "import pathlib, sys, time as t; pathlib.Path(sys.argv[0]).with_name('asked to stop').touch()"
RESULT = '{"step": 8, "commit": "https://hub/commit/1"}'
Upload = Callable[..., tuple[dict[str, Any], list[str]]]


@pytest.fixture
def upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upload:
    """Uploads step 8 by a program that runs a script, or is not there (None). Returns the summary and the warnings."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def upload(script: str | None, **settings: Any) -> tuple[dict[str, Any], list[str]]:
        (tmp_path / "push.py").write_text(script or "")
        warnings: list[str] = []
        options = Hub(repository="a/b", every="checkpoint", **settings)
        push = partial(Push, command=("/no/such/program" if script is None else sys.executable, f"{tmp_path}/push.py"))
        with closing(BackgroundUploader(options, str(tmp_path), warnings.append, push)) as pushes:
            pushes.note_commit(8)
            return pushes.finish(8, (tmp_path / "asked to stop").exists), warnings

    return upload


@pytest.mark.parametrize(
    "noise",
    [
        "import atexit; atexit.register(print, 'ResourceWarning: unclosed socket')",
        "print('[1, 2]'); print('12'); print('null')",
        "import sys; print('warning', file=sys.stderr)",
    ],
)
def test_a_line_after_the_result_changes_nothing(upload: Upload, noise: str) -> None:
    pushed = {"repository": "a/b", "step": 8, "commit": "https://hub/commit/1", "error": None}
    assert upload(f"print('{RESULT}'); {noise}") == (pushed, [])


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("print('done')", "told no commit: done"),
        ("", "told no commit"),
        ("raise SystemExit('tpu-train: error: no hf_secret')", r"no \*\*\*"),
        ("import os; os.write(1, b'\\xff' * 9); os._exit(3)", "\ufffd"),
        ("import os; os._exit(3)", "ended with 3"),
        ("import time; time.sleep(60)", "not done within hub.wait_seconds"),
        (f"{STOP}; t.sleep(60)", "not done when this host was asked to stop"),
        (None, "No such file"),
    ],
)
def test_an_upload_that_fails_is_one_warning(upload: Upload, script: str | None, error: str) -> None:
    began = time.monotonic()
    summary, warnings = upload(script, wait_seconds=1 if "import time" in str(script) else 30)
    assert time.monotonic() - began < 30
    assert summary["commit"] is None
    assert re.search(error, summary["error"])
    assert len(warnings) == 1


def test_a_killed_upload_leaves_no_files(upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read again
    upload(f"import tempfile; tempfile.mkdtemp(); {STOP}; t.sleep(60)")
    assert not [*scratch.iterdir()]


def test_an_upload_whose_output_cannot_be_read_fails_alone(upload: Upload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.models.hub._last_lines", int)  # raises TypeError
    assert upload("", wait_seconds=60)[0]["error"].startswith("TypeError: ")


def test_a_result_is_a_step_and_a_commit_and_nothing_else() -> None:
    assert find_result(["x", RESULT, "[" * 10, "{}", '{"step": "8", "commit": null}']) == json.loads(RESULT)
    assert find_result(["[" * 100_000]) is find_result([]) is None


@pytest.mark.parametrize(("base", "metadata"), [("org/base", "base_model: org/base\n"), ("gs://bucket/start", "")])
def test_an_adapter_is_pushed_with_a_card_for_peft(monkeypatch: pytest.MonkeyPatch, base: str, metadata: str) -> None:
    def export(run: str, folder: str, step: int | None) -> int:
        Path(folder, "adapter_config.json").write_text(f'{{"peft_type": "LORA", "base_model_name_or_path": "{base}"}}')
        return 8

    upload = Mock(side_effect=lambda folder_path, **_: Mock(commit_url=Path(folder_path, "README.md").read_text()))
    api = Mock(file_exists=lambda *_: False, upload_folder=upload)
    monkeypatch.setitem(sys.modules, "huggingface_hub", Mock(HfApi=lambda **_: api))
    monkeypatch.setattr("training.models.export.export_checkpoint", export)
    for name in ("HF_TOKEN", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    _, card = push_model("/no/such/run", "a/b", None, private=True)
    assert card.startswith(f"---\nlibrary_name: peft\n{metadata}---\n\n# a/b\n")
    assert upload.call_args.kwargs["delete_patterns"] == ["adapter_config.json", "adapter_model.safetensors"]
