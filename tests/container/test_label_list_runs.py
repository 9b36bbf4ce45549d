"""Tasks with a label for each word, or any number for each text: from users' files to a model for pipelines."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.container import small_runs
from tests.container.small_runs import labelled_document
from training import one_host
from training.data.formats.fixed_records import read_column, record_layout
from training.data.formats.open_dataset import open_dataset
from training.data.prepare.tokenizer_training import write_tokenizer
from training.errors import BadInput
from training.yaml_file import ConfigError

NAMES = ["B-LOW", "B-TOP", "O"]


def name_of(number: int) -> str:
    return "B-LOW" if number < 40 else "B-TOP" if number >= 150 else "O"


def sentences(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(190) for _ in range(chance.randrange(3, 12))] for _ in range(count)]


def write_conll(path: Path, rows: list[list[int]]) -> None:
    texts = ["\n".join(f"w{number} -X- {name_of(number)}" for number in row) for row in rows]
    path.write_text("\n\n".join(["-DOCSTART- -X- O", *texts]) + "\n")


def write_lines(path: Path, rows: list[list[int]]) -> None:
    """Each text with the names of its words, as a set without O."""
    texts = [" ".join(f"w{number}" for number in row) for row in rows]
    kinds = [sorted({*map(name_of, row)} - {"O"}) for row in rows]
    lines = [{"text": text, "kinds": names} for text, names in zip(texts, kinds, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module", params=["token-classification", "multi-label"])
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prepare(place: Path, task: str) -> Path:
    """Tokenizer and shards, by the command that users have: words from CoNLL's columns, sets from JSON lines."""
    small_runs.write_tokenizer(place / "tokenizer")
    of_words = task == "token-classification"
    suffix, write = (".conll", write_conll) if of_words else (".jsonl", write_lines)
    write(place / f"train{suffix}", sentences(200, 1))
    write(place / f"evaluation{suffix}", sentences(37, 2))
    small_runs.labelled_shards(place, task, suffix, *([] if of_words else ["--label", "kinds"]))
    return place


@pytest.fixture(scope="module")
def folder(task: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp(task), task)


@pytest.fixture(scope="module")
def trained(folder: Path, task: str) -> dict[str, Any]:
    return small_runs.train_here(labelled_document(folder, task), "undisturbed")


def test_it_learns_and_figures_are_those_of_its_predictions(folder: Path, task: str, trained: dict[str, Any]) -> None:
    assert trained["last_loss"] < trained["first_loss"] / 2
    assert (trained["device_to_host_syncs"], trained["host_fallbacks"]) == (0, [])
    rows = sentences(37, 2)
    hits = counted = right = 0
    of_words = task == "token-classification"
    pipe = transformers.pipeline(task if of_words else "text-classification", model=trained["model"], device="cpu")
    everything = {"ignore_labels": []} if of_words else {"top_k": None}
    for row in rows:
        found, names = pipe(" ".join(f"w{number}" for number in row), **everything), [*map(name_of, row)]
        if of_words:
            answers = [answer["entity"] for answer in found]
            right += sum(map(str.__eq__, answers, names))
            own, wanted = ({pair for pair in enumerate(each) if pair[1] != "O"} for each in (answers, names))
        else:
            own, wanted = {answer["label"] for answer in found if answer["score"] > 0.5}, {*names} - {"O"}
        hits, counted = hits + len(own & wanted), counted + len(own) + len(wanted)
    assert trained["eval_micro_f1"] == pytest.approx(2 * hits / counted, rel=1e-5)
    assert trained["eval_micro_f1"] > 0.8
    if of_words:
        told = one_host.predict(trained["model"], " ".join(f"w{number}" for number in row))
        assert [text[:3] for _, text in told] == [answer[2:] for answer in answers if answer != "O"]
        assert trained["eval_accuracy"] == pytest.approx(right / sum(map(len, rows)), rel=1e-5)
    evaluated = small_runs.evaluate_here(labelled_document(folder, task), trained["model"])
    assert evaluated.figures["loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    assert (evaluated.confusion is None) == (not of_words)


def test_class_weights_count_in_the_loss(folder: Path, task: str, trained: dict[str, Any]) -> None:
    once = {"train__steps": 1, "train__warmup_steps": 0, "train__dropout": 0.0, "evaluation__every": None}

    def first_loss(run_id: str, weights: dict[str, float]) -> float:
        changes = {"model": {"path": trained["model"]}, "train__class_weights": weights, **once}
        return float(small_runs.train_here(labelled_document(folder, task, **changes), run_id)["first_loss"])

    if task == "multi-label":
        with pytest.raises(ConfigError, match=r"train\.class_weights: needs task: classification or"):
            first_loss("weighted", {"O": 3.0})
        return
    with pytest.raises(BadInput, match=r"train\.class_weights names X, and .* has the labels: B-LOW, B-TOP, O"):
        first_loss("unknown", {"X": 2.0})
    plain = first_loss("plain", {})
    assert first_loss("equal", dict.fromkeys(NAMES, 0.5)) == pytest.approx(plain, rel=1e-6)
    assert first_loss("weighted", {"O": 3.0}) != pytest.approx(plain, rel=1e-3)


def test_only_the_first_token_of_a_word_has_its_label(tmp_path: Path) -> None:
    """With a tokenizer that cuts words, and a text that is longer than the row."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]", "a", "##b"]
    tokenizer = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer.add_special_tokens(pieces[:5])
    write_tokenizer(str(tmp_path / "tokenizer"), tokenizer.to_str().encode())
    columns = ["--field", "tokens", "--label", "ner_tags", "--labels", tmp_path / "names.json", "--overwrite"]

    def shards(*rows: dict[str, Any]) -> str:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return small_runs.labelled_shards(tmp_path, "token-classification", ".jsonl", *columns)

    rows = [{"tokens": ["abb", "a"], "ner_tags": [1, 0]}, {"tokens": ["ab"] * 12, "ner_tags": [1] * 12}]
    (tmp_path / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "names.json").write_text(json.dumps(["O", "B-X"]))
    assert "1 texts were longer than 16 tokens and were cut" in shards(*rows)
    found = {}
    dataset = open_dataset(str(tmp_path / "train"))
    for shard in dataset.shards:
        layout = record_layout(dataset.manifest.features, shard.length)
        data = (tmp_path / "train" / shard.name).read_bytes()
        found[shard.length] = [read_column(layout, data, name)[0].tolist() for name in ("input_ids", "label")]
    assert found[8] == [[0, 5, 6, 6, 5, 1, 3, 3], [-100, 1, -100, -100, 0, -100, -100, -100]]
    assert found[16] == [[0, *[5, 6] * 7, 1], [-100, *[1, -100] * 7, -100]]
    with pytest.raises(BadInput, match=r"train\.jsonl:1 has 1 words in 'tokens' and 2 labels: each word needs one$"):
        shards({"tokens": ["a"], "ner_tags": [1, 0]})
    with pytest.raises(BadInput, match=r"train\.jsonl:1: label 'B-X' is not a list of labels"):
        shards({"tokens": ["a"], "ner_tags": "B-X"})
