"""Whatever a user, another program or a broken disk gives as input is read, or refused by a message with its place.

Each subject makes one spoilt input from random numbers and reads it. It returns whether the input was accepted, and
raises AssertionError where nonsense was accepted or a message does not say where the mistake is. Any other exception
is a traceback that a user would see.

20,000 inputs by default; TPU_LAUNCH_FUZZ=N takes another number and TPU_LAUNCH_FUZZ_SEED=S another seed. A failure
names its input: `TPU_LAUNCH_FUZZ_CASE=CSV/0/17` makes that one alone.
"""

import functools
import itertools
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.packed_datasets import pack_rows
from tests.training.mutations import TEXTS, spoil_bytes, spoil_json, spoil_lines
from training.checkpoint import format as checkpoint_format
from training.checkpoint.tensors import Damaged, TensorSpec
from training.config import Model, from_document
from training.data import tokenizer as tokenizers
from training.data.formats import dataset as datasets
from training.data.formats import example_codec, tfrecord, verify
from training.data.formats.dataset import Dataset
from training.data.formats.open_dataset import open_dataset
from training.data.loading.record_source import open_source
from training.data.prepare import labelled_rows
from training.data.prepare.corpus import Corpus
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.labelled_rows import LabelKind, select_columns
from training.errors import BadInput
from training.models.flops import flops_per_row
from training.models.hugging_face import (
    FAMILIES,
    SIZES,
    ModelRequirements,
    build_model_config,
    read_config,
    read_labels,
)
from training.registry import TASKS, task_of_model
from training.storage.types import place_mistake
from training.yaml_file import ConfigError, parse

INPUTS = int(os.environ.get("TPU_LAUNCH_FUZZ", "20000"))
SEED = int(os.environ.get("TPU_LAUNCH_FUZZ_SEED", "0"))
ONE = os.environ.get("TPU_LAUNCH_FUZZ_CASE", "")

CONFIGURATION = """\
project: my-project
slice: {name: demo, accelerator_type: v4-16}
run: {secrets: [HF_TOKEN]}
seed: 1
task: mlm
model:
  name: bert-tiny
data: &data
  train: gs://b/train
  evaluation: gs://b/evaluation
  tokenizer: gs://b/tokenizer
  masking: {percent: 15}
train:
  steps: 100
  global_batch_size: 64
  learning_rate: 1e-4
  clip_norm: 1.0
  warmup_steps: 10
evaluation:
  every: 50
checkpoint:
  every_minutes: 15
  best: {metric: loss, mode: min}
rendezvous: {seconds: 300}
hub: {repository: org/model, wait_seconds: 60}
output: gs://b/runs
"""
YAML_PIECES = (
    *TEXTS, "1: x", "~: x", "2020-01-01: x", "? [1]", "&a", "*a", "*data", "<<: *data", "&data", "!!int x",
    "!!python/x y",
    "---", "%YAML 1.1", "[" * 50, "{a: " * 20, ".inf", "-.inf", ".nan", "010", "1:30", "0x1f", "yes", "!!set {x}", "|",
    ">", "- x", "steps: 010", "steps: 1:30", "learning_rate: .inf", "output: ''", "train: {}", "task: classification",
    "evaluation: gs://b/train", '"\\ud800"', '"\\0"', "# ", ": ", "9" * 5000, "2020-99-99", "{", "}", "'", '"', "\r",
)  # fmt: skip
VALUES = (
    "''", "' a'", "s3://b/c", "GS://b/c", "gs:/b", "gs://", "gs://b/train", "gs://b/train/", ".inf", "-.inf", ".nan",
    "1e999", "accurcy", "accuracy", "max", "min", "0", "-1", "1e-3", "010", "1:30", "yes", "true", "~", "[]", "{}",
    "classification", "{metric: loss, mode: max}", "5", "1e300", "'100'", "0.5", "/data", "v3-8", "v3-16",
)  # fmt: skip
ROWS = [{"text": f"text number {number}", "label": ("card", "cash")[number % 2]} for number in range(6)]
CSV = "text,label\n" + "".join(f'"{row["text"]}, quoted",{row["label"]}\n' for row in ROWS)
LISTS = [
    {"text": row["text"].split() if number % 2 else row["text"], "label": [row["label"], "O", "O"]}
    for number, row in enumerate(ROWS)
]
CONLL = "-DOCSTART- O\n\nEU NNP B-ORG\nrejects VBZ O\n\nGerman B-MISC\n"
LINE_PIECES = (
    *TEXTS, "text,label", "text,text", ",", ",,,", '"', '""', '"open', "\r", "\r\n", "a,b,c", '{"text": ', "[1]",
    '{"text": 5}',
    "null", '{"text": "a", "label": [1]}', '{"text": "\\ud83d", "label": "a"}', '{"text": "a", "label": " a"}',
    '{"text": "a", "label": ""}', "[" * 3000, "9" * 5000, "NaN", "\x1a",
)  # fmt: skip
SPECIAL = ("[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]")
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [{"id": number, "content": token, "special": True} for number, token in enumerate(SPECIAL)],
    "model": {"type": "WordLevel", "vocab": {token: number for number, token in enumerate((*SPECIAL, "word"))}},
}
MODEL_CONFIG = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_hidden_layers": 2,
    "vocab_size": 100,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32, "id2label": {"0": "a", "1": "b"},
    "label2id": {"a": 0, "b": 1}, "problem_type": "single_label_classification", "_name_or_path": "x",
}  # fmt: skip
VOCABULARY, LENGTH = 100, 8


def _require(is_right: object, message: object) -> None:
    """Raises AssertionError with the message unless something holds of an error."""
    if not is_right:
        raise AssertionError(message)


def read_configuration(folder: Path, random: Random) -> bool:
    text, overrides = CONFIGURATION, []
    if random.random() < 0.5:
        text = spoil_lines(text, YAML_PIECES, random)
    elif random.random() < 0.8:
        keys = re.findall(r"\w+: [^\s{}&][^\n{},]*", text)
        key = random.choice(keys)
        text = text.replace(key, f"{key.partition(':')[0]}: {random.choice(VALUES)}", 1)
    if random.random() < 0.3:
        keys = ("train.steps", "output", "checkpoint.best.mode", "data", "model.path", "", "a..b", "train")
        key = random.choice(keys)
        overrides = [f"{key}={random.choice(YAML_PIECES)}"]
    try:
        document = parse(text, "run.yaml", overrides)
        config = from_document(document)
    except ConfigError as error:
        for line in str(error).splitlines():
            _require(re.match(r"run\.yaml:\d+: |--set |run\.yaml: missing key", line), f"no place in {line!r}")
        return False
    assert place_mistake(config.output) is None
    assert config.data.evaluation is None or config.data.evaluation.rstrip("/") != config.data.train.rstrip("/")
    assert all(map(math.isfinite, _floats(config.model_dump())))
    if best := config.checkpoint.best:
        assert TASKS[config.task].figures[best.metric] == best.mode
    assert from_document(parse(document.dump(), "dumped.yaml")) == config, "a dump means something else"
    return True


def _floats(value: Any) -> list[float]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, float) else [number for item in items for number in _floats(item)]


def _read_corpus(folder: Path, random: Random, name: str, content: str) -> bool:
    """A file of rows: as documents, as numbers, as classes, as sets of classes and as words with their classes."""
    text = spoil_lines(content, LINE_PIECES, random)
    data = text.encode("utf-8", "surrogatepass" if random.random() < 0.1 else "replace")
    if random.random() < 0.2:
        data = spoil_bytes(data, random)
    path = folder / name
    path.write_bytes(data)
    corpus = Corpus(str(path))
    way = random.randrange(5)
    try:
        if way == 0:
            texts = list(corpus.documents())
        else:
            labels = LabelKind(("class-labelled", "number-labelled", "set-labelled", "token-labelled")[way - 1])
            pairs = list(select_columns(corpus.rows(), "text", "label", corpus.name, labels))
            texts = [text if isinstance(text, str) else " ".join(text) for text, _ in pairs]
            assert way == 4 or all(isinstance(text, str) for text, _ in pairs)
            names = [name for _, label in pairs for name in (label if labels.is_list else [label])]
            assert way == 2 or not any(map(labelled_rows.label_mistake, names))
    except BadInput as error:
        _require(re.match(rf"{re.escape(str(path))}:(\d+)? ?", str(error)), f"no file in {error}")
        _require(re.search(rf"{re.escape(name)}:\d+|near byte \d+|row \d+", str(error)), f"no line in {error}")
        return False
    for text in texts:
        text.encode()  # whatever is accepted can be tokenized and hashed
    return True


def read_table(folder: Path, random: Random) -> bool:
    return _read_corpus(folder, random, "rows.csv", random.choice(("", "", "\ufeff")) + CSV)


def read_columns(folder: Path, random: Random) -> bool:
    return _read_corpus(folder, random, "rows.conll", CONLL)


def read_lines(folder: Path, random: Random) -> bool:
    rows = random.choice((ROWS, LISTS[::2], LISTS[1::2]))
    if random.random() < 0.5:
        lines = (json.dumps(spoil_json(row, random) if random.random() < 0.3 else row) for row in rows)
        content = "".join(line + "\n" for line in lines)
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows)
    return _read_corpus(folder, random, "rows.jsonl", content)


def read_text(folder: Path, random: Random) -> bool:
    content = "\n\n".join(row["text"] for row in ROWS)
    data = spoil_bytes(spoil_lines(content, TEXTS, random).encode("utf-8", "surrogatepass"), random)
    path = folder / "text.txt"
    path.write_bytes(data)
    try:
        texts = list(Corpus(str(path)).documents())
    except BadInput as error:
        place = rf"{re.escape(str(path))}: not UTF-8 text near byte \d+ \(after line \d+\)"
        _require(re.match(place, str(error)), error)
        return False
    assert all(text.strip() for text in texts)
    return True


def read_tokenizer(folder: Path, random: Random) -> bool:
    content = json.dumps(spoil_json(TOKENIZER, random)).encode()
    (folder / "tokenizer.json").write_bytes(spoil_bytes(content, random) if random.random() < 0.3 else content)
    try:
        special = tokenizers.read(str(folder)).special
    except BadInput as error:
        _require(str(error).startswith(f"{folder}/tokenizer.json"), error)
        return False
    assert 0 <= special.mask < special.vocabulary
    assert 0 <= special.pad < special.vocabulary
    assert all(0 <= number < special.vocabulary for number in special.special)
    return True


def read_model(folder: Path, random: Random) -> bool:
    content = json.dumps(spoil_json(MODEL_CONFIG, random)).encode()
    (folder / "config.json").write_bytes(spoil_bytes(content, random) if random.random() < 0.2 else content)
    task = random.choice(list(TASKS))
    try:
        values = read_config(str(folder))
        task_of_model(values)
        read_labels(values)
        needs = ModelRequirements(VOCABULARY, 3, LENGTH, TASKS[task].head, ("a", "b"))
        config = build_model_config(Model(path=str(folder)), needs, dropout=0.1)
        assert all(type(config.get(name, 1)) is int for name in SIZES) or config["model_type"] not in FAMILIES
        flops_per_row(config, LENGTH, 2 if task == "mlm" else None)
    except BadInput as error:
        _require("config.json" in str(error) or str(folder) in str(error), error)
        return False
    return True


def _spec(name: str, shape: tuple[int, ...]) -> tuple[str, checkpoint_format.StoredTensor]:
    box = checkpoint_format.whole(shape)
    spec = TensorSpec("F32", shape, 4 * math.prod(shape))
    return name, checkpoint_format.StoredTensor(spec, (checkpoint_format.StoredSlice(0, box),))


CHECKPOINT = checkpoint_format.to_json(
    checkpoint_format.Manifest(
        step=40, parts=(checkpoint_format.Part("part-0-of-1.ab.safetensors", 100, 7),), identity={"seed": 1},
        state={"first_loss": 5.5}, config={}, code="c", run_id="r",
        tensors=dict([_spec("w", (4, 2)), _spec("b", (3,))]),
    )
)  # fmt: skip


def read_checkpoint(folder: Path, random: Random) -> bool:
    body = spoil_json(CHECKPOINT, random)
    if isinstance(body, dict) and random.random() < 0.9:
        body["crc32c"] = f"{google_crc32c.value(json.dumps(body, sort_keys=True, default=str).encode()):08x}"
    data = json.dumps(body).encode()
    try:
        manifest = checkpoint_format.load_manifest(spoil_bytes(data, random) if random.random() < 0.1 else data)
    except Damaged as error:
        _require("manifest.json" in str(error), error)
        return False
    assert manifest.step >= 0
    assert all(type(part.size) is int and "/" not in part.name for part in manifest.parts)
    assert checkpoint_format.load_manifest(checkpoint_format.dump_manifest(manifest)) == manifest
    return True


@functools.cache
def _good_dataset(folder: Path, layout: str) -> tuple[Dataset, dict[str, bytes]]:
    """A dataset of 20 records in two shards, and the bytes of its files."""
    rows = np.random.default_rng(0).integers(5, VOCABULARY, (20, LENGTH)).astype(np.int32)
    dataset = pack_rows(folder / layout, DatasetPlan("train", LENGTH, "t", VOCABULARY, 10, layout), rows)
    return dataset, {path.name: path.read_bytes() for path in (folder / layout).iterdir()}


def _read_dataset(url: str, random: Random, *, named: str) -> bool:
    """Opens the dataset, reads all of it, and lists its problems. `named`: what each message must contain."""
    on_corrupt = random.choice(("stop", "skip"))
    try:
        dataset = open_dataset(url)
        dataset.require(rows="packed")
        source = open_source(dataset, vocabulary=VOCABULARY, on_corrupt=on_corrupt)
        for first in range(0, source.records, 4):
            ids = source.read(first, min(first + 4, source.records), 4)["input_ids"]
            assert ids.min() >= 0
            assert ids.max() < VOCABULARY, "an id that the tokenizer does not have"
    except BadInput as error:
        _require(str(error).startswith(url), f"no place in {error}")
        _require(re.search(named, str(error)), f"no file or record in {error}")
        return False
    for problem in itertools.islice(verify.problems(dataset, VOCABULARY), 100):
        assert url in problem, problem
    return True


def read_manifest(folder: Path, random: Random) -> bool:
    dataset, files = _good_dataset(folder, "compact")
    body = spoil_json({key: value for key, value in json.loads(files["dataset.json"]).items() if key != "hash"}, random)
    if isinstance(body, dict) and random.random() < 0.9:
        body["hash"] = datasets._hash(body)
    data = json.dumps(body).encode()
    path = Path(dataset.url) / "dataset.json"
    path.write_bytes(spoil_bytes(data, random) if random.random() < 0.1 else data)
    try:
        return _read_dataset(dataset.url, random, named=r"dataset\.json|\.tfrecord|holds")
    finally:
        path.write_bytes(files["dataset.json"])


def read_shard(folder: Path, random: Random) -> bool:
    layout = random.choice(("compact", "recipe", "published"))
    dataset, files = _good_dataset(folder, "recipe" if layout == "published" else layout)
    path = Path(dataset.url) / random.choice([shard.name for shard in dataset.shards])
    manifest = Path(dataset.url) / "dataset.json"
    data = spoil_bytes(files[path.name], random)
    if random.random() < 0.4:  # right checksums, and what no record of this dataset is
        records = tfrecord.walk(files[path.name], path.name)
        data = tfrecord.join(_spoil_example(payload, random) for _, payload in records)
    path.write_bytes(data)
    if layout == "published":
        manifest.unlink()
    try:
        return _read_dataset(dataset.url, random, named=r"record \d+|\.tfrecord|no shard")
    finally:
        path.write_bytes(files[path.name])
        manifest.write_bytes(files["dataset.json"])


def _spoil_example(payload: bytes, random: Random) -> bytes:
    """A record that a program with other ideas wrote: most stay as they are."""
    action = random.randrange(12)
    decoded = example_codec.decode(payload)
    features: dict[str, Any] = {name: value[0] if isinstance(value, list) else value for name, value in decoded.items()}
    if action == 0:
        return spoil_bytes(payload, random)
    if action == 1 and isinstance(features["input_ids"], np.ndarray):
        ids = features["input_ids"].copy()
        ids[random.randrange(len(ids))] = random.choice((-1, VOCABULARY, 1 << 40))
        features["input_ids"] = ids
    if action == 2 and "attention_mask" in features:
        features["attention_mask"] = np.array([1] * (LENGTH - 2) + [0, 0])
    if action == 3:
        features["input_ids"] = features["input_ids"][:-1]
    if action == 4:
        features = {"input_id": features["input_ids"]}
    return example_codec.encode(features) if action < 5 else payload


# name: share of all inputs, and what makes and reads one in a folder
SUBJECTS: dict[str, tuple[int, Callable[[Path, Random], bool]]] = {
    "configurations": (15, read_configuration),
    "CSV": (15, read_table),
    "JSONL": (15, read_lines),
    "CoNLL": (5, read_columns),
    "text": (10, read_text),
    "dataset manifests": (10, read_manifest),
    "shards": (10, read_shard),
    "tokenizers": (10, read_tokenizer),
    "model folders": (8, read_model),
    "checkpoint manifests": (7, read_checkpoint),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SUBJECTS)
def test_bad_input_is_told_with_its_place(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight, read = SUBJECTS[name]
    count = INPUTS * weight // sum(share for share, _ in SUBJECTS.values())
    cases = [f"{name}/{SEED}/{number}" for number in range(count)]
    if ONE:
        cases = [case for case in [ONE] if case.startswith(f"{name}/")]
    outcomes: Counter[bool] = Counter()
    began = time.process_time()
    for case in cases:
        try:
            outcomes[read(tmp_path, Random(case))] += 1
        except Exception as error:
            pytest.fail(f"TPU_LAUNCH_FUZZ_CASE='{case}': {type(error).__name__}: {error!s:.1000}")
    counts = f"{len(cases)} inputs, {outcomes[False]} refused with their place, {outcomes[True]} read"
    with capsys.disabled():
        print(f"\n{name}: {counts}, {time.process_time() - began:.1f} s", end="")
    assert ONE or min(outcomes[True], outcomes[False]) > count / 100, "the grammar makes only one kind of input"
