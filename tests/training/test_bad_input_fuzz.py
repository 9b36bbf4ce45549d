"""Whatever a user, another program or a broken disk gives as input is read, or refused by a message with its place.

Each subject makes one spoilt input from random numbers and reads it. An AssertionError tells that nonsense was accepted
or that a message does not say where the mistake is. Any other exception is a traceback that a user would see.

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

import numpy as np
import pytest

from tests.packed_datasets import pack_rows
from tests.training.mutations import TEXTS, spoil_bytes, spoil_json, spoil_lines
from training.checkpoint import format as checkpoint_format
from training.checkpoint.format import Manifest, Part, StoredSlice, StoredTensor, dump_manifest, load_manifest, to_json
from training.checkpoint.tensors import Damaged, TensorSpec, whole
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
from training.models import hugging_face
from training.models.flops import flops_per_row
from training.registry import TASKS, task_of_model
from training.storage.types import place_mistake
from training.yaml_file import parse

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


def read_configuration(folder: Path, random: Random) -> None:
    text, overrides = CONFIGURATION, []
    if random.random() < 0.5:
        text = spoil_lines(text, YAML_PIECES, random)
    elif random.random() < 0.8:
        key = random.choice(re.findall(r"\w+: [^\s{}&][^\n{},]*", text))
        text = text.replace(key, f"{key.partition(':')[0]}: {random.choice(VALUES)}", 1)
    if random.random() < 0.3:
        keys = ("train.steps", "output", "checkpoint.best.mode", "data", "model.path", "", "a..b", "train")
        overrides = [f"{random.choice(keys)}={random.choice(YAML_PIECES)}"]
    document = parse(text, "run.yaml", overrides)
    config = from_document(document)
    assert place_mistake(config.output) is None
    assert config.data.evaluation is None or config.data.evaluation.rstrip("/") != config.data.train.rstrip("/")
    assert all(map(math.isfinite, _floats(config.model_dump())))
    if best := config.checkpoint.best:
        assert TASKS[config.task].figures[best.metric] == best.mode
    assert from_document(parse(document.dump(), "dumped.yaml")) == config, "a dump means something else"


def _floats(value: Any) -> list[float]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, float) else [number for item in items for number in _floats(item)]


def _read_corpus(folder: Path, random: Random, name: str, content: str) -> None:
    """A file of rows: as documents, as numbers, as classes, as sets of classes and as words with their classes."""
    text = spoil_lines(content, LINE_PIECES, random)
    data = text.encode("utf-8", "surrogatepass" if random.random() < 0.1 else "replace")
    (folder / name).write_bytes(spoil_bytes(data, random) if random.random() < 0.2 else data)
    corpus, way = Corpus(str(folder / name)), random.randrange(5)
    if way == 0:
        texts = list(corpus.documents())
    else:
        labels = LabelKind(("class-labelled", "number-labelled", "set-labelled", "token-labelled")[way - 1])
        pairs = list(select_columns(corpus.rows(), "text", "label", corpus.name, labels))
        texts = [text if isinstance(text, str) else " ".join(text) for text, _ in pairs]
        assert way == 4 or all(isinstance(text, str) for text, _ in pairs)
        names = [name for _, label in pairs for name in (label if labels.is_list else [label])]
        assert way == 2 or not any(map(labelled_rows.label_mistake, names))
    for text in texts:
        text.encode()  # whatever is accepted can be tokenized and hashed


def read_table(folder: Path, random: Random) -> None:
    _read_corpus(folder, random, "rows.csv", random.choice(("", "", "\ufeff")) + CSV)


def read_columns(folder: Path, random: Random) -> None:
    _read_corpus(folder, random, "rows.conll", CONLL)


def read_lines(folder: Path, random: Random) -> None:
    rows, share = random.choice((ROWS, LISTS[::2], LISTS[1::2])), random.choice((0, 0.3))
    lines = (json.dumps(spoil_json(row, random) if random.random() < share else row) for row in rows)
    _read_corpus(folder, random, "rows.jsonl", "".join(line + "\n" for line in lines))


def read_text(folder: Path, random: Random) -> None:
    text = spoil_lines("\n\n".join(row["text"] for row in ROWS), TEXTS, random)
    (folder / "text.txt").write_bytes(spoil_bytes(text.encode("utf-8", "surrogatepass"), random))
    assert all(text.strip() for text in Corpus(str(folder / "text.txt")).documents())


def _spoil_document(value: Any, random: Random, checksum: str = "", sign: Callable[[Any], str] = str) -> bytes:
    """JSON with spoilt values, most of it under a right checksum, some with spoilt bytes."""
    value = spoil_json({name: each for name, each in value.items() if name != checksum}, random)
    if checksum and isinstance(value, dict) and random.random() < 0.9:
        value[checksum] = sign(value)
    data = json.dumps(value).encode()
    return spoil_bytes(data, random) if random.random() < 0.2 else data


def read_tokenizer(folder: Path, random: Random) -> None:
    (folder / "tokenizer.json").write_bytes(_spoil_document(TOKENIZER, random))
    special = tokenizers.read(str(folder)).special
    assert all(0 <= number < special.vocabulary for number in (special.mask, special.pad, *special.special))


def read_model(folder: Path, random: Random) -> None:
    (folder / "config.json").write_bytes(_spoil_document(MODEL_CONFIG, random))
    task, values = random.choice(list(TASKS)), hugging_face.read_config(str(folder))
    task_of_model(values)
    hugging_face.read_labels(values)
    needs = hugging_face.ModelRequirements(VOCABULARY, 3, LENGTH, TASKS[task].head, ("a", "b"))
    config = hugging_face.build_model_config(Model(path=str(folder)), needs, dropout=0.1)
    assert (
        all(type(config.get(name, 1)) is int for name in hugging_face.SIZES)
        or config["model_type"] not in hugging_face.FAMILIES
    )
    flops_per_row(config, LENGTH, 2 if task == "mlm" else None)


def _stored(*shape: int) -> StoredTensor:
    return StoredTensor(TensorSpec("F32", shape, 4 * math.prod(shape)), (StoredSlice(0, whole(shape)),))


PARTS = (Part("part-0-of-1.ab.safetensors", 100, 7),)
TENSORS = {"w": _stored(4, 2), "b": _stored(3)}
CHECKPOINT = to_json(Manifest(40, PARTS, {"seed": 1}, {"first_loss": 5.5}, {}, "c", TENSORS, run_id="r"))


def read_checkpoint(folder: Path, random: Random) -> None:
    manifest = load_manifest(_spoil_document(CHECKPOINT, random, "crc32c", checkpoint_format._checksum))
    assert manifest.step >= 0
    assert all(type(part.size) is int and "/" not in part.name for part in manifest.parts)
    assert load_manifest(dump_manifest(manifest)) == manifest


@functools.cache
def _good_dataset(folder: Path, layout: str) -> tuple[Dataset, dict[str, bytes]]:
    """A dataset of 20 records in two shards, and the bytes of its files."""
    rows = np.random.default_rng(0).integers(5, VOCABULARY, (20, LENGTH)).astype(np.int32)
    dataset = pack_rows(folder / layout, DatasetPlan("train", LENGTH, "t", VOCABULARY, 10, layout), rows)
    return dataset, {path.name: path.read_bytes() for path in (folder / layout).iterdir()}


def _read_dataset(dataset: Dataset, random: Random, changes: dict[str, bytes | None]) -> None:
    """Replaces or removes some of its files, opens the dataset, reads all of it, and lists its problems."""
    url = Path(dataset.url)
    _, files = _good_dataset(url.parent, url.name)
    for name, data in (files | changes).items():
        (url / name).unlink(missing_ok=True) if data is None else (url / name).write_bytes(data)
    opened = open_dataset(dataset.url)
    opened.require(rows="packed")
    source = open_source(opened, vocabulary=VOCABULARY, on_corrupt=random.choice(("stop", "skip")))
    for first in range(0, source.records, 4):
        ids = source.read(first, min(first + 4, source.records), 4)["input_ids"]
        assert ids.min() >= 0
        assert ids.max() < VOCABULARY, "an id that the tokenizer does not have"
    for problem in itertools.islice(verify.problems(opened, VOCABULARY), 100):
        assert dataset.url in problem, problem


def read_manifest(folder: Path, random: Random) -> None:
    dataset, files = _good_dataset(folder, "compact")
    spoilt = _spoil_document(json.loads(files["dataset.json"]), random, "hash", datasets._hash)
    _read_dataset(dataset, random, {"dataset.json": spoilt})


def read_shard(folder: Path, random: Random) -> None:
    layout = random.choice(("compact", "recipe", "published"))
    dataset, files = _good_dataset(folder, "recipe" if layout == "published" else layout)
    name = random.choice(dataset.shards).name
    data = spoil_bytes(files[name], random)
    if random.random() < 0.4:  # right checksums, and what no record of this dataset is
        data = tfrecord.join(_spoil_example(payload, random) for _, payload in tfrecord.walk(files[name], name))
    _read_dataset(dataset, random, {name: data, **({"dataset.json": None} if layout == "published" else {})})


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


ONE_LINE = r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*"
ROW_PLACE = r"{folder}/%s:(\d+|.*(%s:\d+|near byte \d+|row \d+))"
# name: share of all inputs, what makes and reads one in a folder, and the pattern of a message with its place
SUBJECTS: dict[str, tuple[int, Callable[[Path, Random], None], str]] = {
    "configurations": (
        15,
        read_configuration,
        rf"((run\.yaml:\d+: |--set |run\.yaml: missing key){ONE_LINE}(\n|$))+\Z",
    ),
    "CSV": (15, read_table, ROW_PLACE % ("rows.csv", "rows.csv")),
    "JSONL": (15, read_lines, ROW_PLACE % ("rows.jsonl", "rows.jsonl")),
    "CoNLL": (5, read_columns, ROW_PLACE % ("rows.conll", "rows.conll")),
    "text": (10, read_text, r"{folder}/text.txt: not UTF-8 text near byte \d+ \(after line \d+\)"),
    "dataset manifests": (10, read_manifest, r"{folder}/compact.*(dataset\.json|\.tfrecord|holds)"),
    "shards": (10, read_shard, r"{folder}/(compact|recipe).*(record \d+|\.tfrecord|no shard)"),
    "tokenizers": (10, read_tokenizer, "{folder}/tokenizer.json"),
    "model folders": (8, read_model, ".*({folder}|config.json)"),
    "checkpoint manifests": (7, read_checkpoint, ".*manifest.json"),
}


def is_accepted(name: str, folder: Path, random: Random) -> bool:
    _, read, place = SUBJECTS[name]
    refusal = Damaged if name == "checkpoint manifests" else BadInput
    try:
        read(folder, random)
    except refusal as error:
        if re.match(place.replace("{folder}", re.escape(str(folder))), str(error), re.DOTALL):
            return False
        raise AssertionError(f"no place in {error!s:.1000}") from error
    return True


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SUBJECTS)
def test_bad_input_is_told_with_its_place(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = INPUTS * SUBJECTS[name][0] // sum(share for share, *_ in SUBJECTS.values())
    cases = [f"{name}/{SEED}/{number}" for number in range(count)]
    if ONE:
        cases = [case for case in [ONE] if case.startswith(f"{name}/")]
    outcomes: Counter[bool] = Counter()
    began = time.process_time()
    for case in cases:
        try:
            outcomes[is_accepted(name, tmp_path, Random(case))] += 1
        except Exception as error:
            pytest.fail(f"TPU_LAUNCH_FUZZ_CASE='{case}': {type(error).__name__}: {error!s:.1000}")
    counts = f"{len(cases)} inputs, {outcomes[False]} refused with their place, {outcomes[True]} read"
    with capsys.disabled():
        print(f"\n{name}: {counts}, {time.process_time() - began:.1f} s", end="")
    assert ONE or min(outcomes[True], outcomes[False]) > count / 100, "the grammar makes only one kind of input"
