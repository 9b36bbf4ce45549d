"""Decoders: from scratch on documents, on the answers of chats, and as an adapter of an earlier run's model."""

import builtins
import inspect
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.container import small_runs
from tests.container.causal_data import LLAMA, document, prepare, shards
from training.config import from_document
from training.data.formats.fixed_records import read_column, record_layout
from training.data.formats.open_dataset import open_dataset
from training.data.prepare.corpus import Corpus
from training.data.prepare.tokenizer_training import train_tokenizer, write_tokenizer
from training.errors import BadInput
from training.models.initial import initial_weight
from training.models.predict import go_on, pipeline_of
from training.run_setup import open_task
from training.yaml_file import Document

TEMPLATE = "{% for m in messages %}[CLS] {{ m.role }} {{ m.content }} [SEP] {% endfor %}"
CHAT = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}] * 2


def require_same_logits(head: str, start: str, adapter: Path, merged: str, **options: Any) -> None:
    """peft puts the adapter onto the starting model, and gets the logits of the merged model."""
    import peft  # other images, whose tests read this module's documents, have none

    models = getattr(transformers, f"AutoModelFor{head}")
    loaded = peft.PeftModel.from_pretrained(models.from_pretrained(start, **options), adapter).eval()
    ids = torch.arange(5, 21).reshape(2, 8)
    with torch.no_grad():
        ours, base = (models.from_pretrained(place, **options).eval()(ids).logits for place in (merged, start))
        torch.testing.assert_close(loaded(ids).logits, ours, rtol=1e-5, atol=1e-6)
    assert (ours - base).abs().max() > 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    return small_runs.train_here(document(folder, train__strict=True, evaluation__every=8), "undisturbed")


def test_a_decoder_learns_from_scratch_and_transformers_goes_on_with_a_text(trained: dict[str, Any]) -> None:
    assert trained["last_loss"] < trained["first_loss"] - 0.3
    assert trained["eval_perplexity"] == pytest.approx(math.exp(trained["eval_loss"]))
    assert (trained["device_to_host_syncs"], trained["host_fallbacks"]) == (0, [])
    assert pipeline_of(trained["model"]) == "text-generation"
    assert go_on(trained["model"], "w1 w2", tokens=3).startswith("w1 w2 ")
    assert len(go_on(trained["model"], "w1 " * 30).split()) <= 33, "32 positions"


def test_an_adapter_has_peft_s_layout_and_merges_to_the_same_model(folder: Path, trained: dict[str, Any]) -> None:
    changes = {"model": {"path": trained["model"]}, "train__steps": 3, "checkpoint__every_steps": None}
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj", "down_proj"]}
    summary = small_runs.train_here(document(folder, **changes, lora=lora), "adapter")
    adapter = Path(summary["model"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "CAUSAL_LM", 2, 4)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert config["base_model_name_or_path"] == trained["model"]
    weights = load_file(adapter / "adapter_model.safetensors")
    assert weights["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (2, 32)
    assert len(weights) == 2 * 2 * 2
    assert not (adapter / "model.safetensors").exists()
    merged = small_runs.train_here(document(folder, **changes, lora={**lora, "merge": True}), "merged")
    require_same_logits("CausalLM", trained["model"], adapter, merged["model"])
    with pytest.raises(BadInput, match=r"lora\.targets: lm_head shares the embeddings' weight"):
        small_runs.train_here(document(folder, **changes, lora={"targets": ["lm_head"]}), "tied")
    evaluated = small_runs.evaluate_here(document(folder), merged["model"])
    assert evaluated.figures["loss"] == pytest.approx(summary["eval_loss"], rel=1e-5)


def write_with_template(source: Path, folder: Path) -> Any:
    """Writes a tokenizer with a chat template. Returns it as transformers loads it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def plain_sums(network: Any, arrays: dict[str, np.ndarray]) -> tuple[torch.Tensor, float]:
    """The summed loss by transformers' modules, and the predictions."""
    ids, places, labels, weights = (torch.from_numpy(value) for value in arrays.values())
    logits = network(input_ids=ids.long(), position_ids=places.long(), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten().long(), reduction="none")
    return (losses * weights.flatten()).sum(), float(weights.sum())


def test_two_hosts_tune_adapters_on_chats_as_peft_in_a_plain_loop(tmp_path: Path) -> None:
    """Questions after Python's functions, answered by their help texts. One process trains peft's modules on the same
    batches, from the same random weights."""
    import peft

    write_tokenizer(str(tmp_path / "plain"), train_tokenizer(Corpus("builtin:pydoc").documents, 700, "wordpiece"))
    for name in ("tokenizer", "start"):
        write_with_template(tmp_path / "plain", tmp_path / name)
    torch.manual_seed(0)
    start, classes = str(tmp_path / "start"), transformers.AutoModelForCausalLM
    classes.from_config(transformers.AutoConfig.for_model(**LLAMA, vocab_size=700)).save_pretrained(start)
    things = {name: inspect.getdoc(thing) for module in (builtins, math, os) for name, thing in vars(module).items()}
    chats = [(f"what is {name}?", text.splitlines()[0]) for name, text in things.items() if text]
    roles = ("user", "assistant")
    messages = [[{"role": role, "content": text} for role, text in zip(roles, chat, strict=True)] for chat in chats]
    corpus = tmp_path / "chats.jsonl"
    corpus.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))
    shards(tmp_path, corpus, chat="messages", evaluation_percent=10.0)

    exact: dict[str, Any] = {"train__schedule": "constant", "train__clip_norm": None}
    exact |= {"train__warmup_steps": 0, "train__weight_decay": 0}
    own = {"model": {"path": start}, "lora": {"rank": 4, "alpha": 8}, "train__learning_rate": 0.01, "train__steps": 60}
    config = document(tmp_path, **exact, **own)
    summary = small_runs.trained(tmp_path, "chats", config, hosts=2)

    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = peft.get_peft_model(classes.from_pretrained(start, attn_implementation="eager"), lora)
    for name, value in plain.named_parameters():
        if "lora_A" in name:
            ours = name.removeprefix("base_model.model.").replace(".default", "")
            deviation = (3 * value.shape[1]) ** -0.5
            value.data = torch.from_numpy(initial_weight(ours, tuple(value.shape), seed=1, deviation=deviation))
    task = open_task(from_document(Document("test", config, {})), small_runs.this_host())
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0)
    batches, theirs = task.batches(0), []
    for _ in range(60):
        loss, predictions = plain_sums(plain, next(batches).arrays)
        optimizer.zero_grad()
        (loss / predictions).backward()
        optimizer.step()
        theirs.append(loss.item() / predictions)
    batches.close()
    with torch.no_grad():
        losses, counts = zip(*(plain_sums(plain, batch.arrays) for batch in task.evaluation_batches()), strict=True)
    assert small_runs.losses(tmp_path, "chats")[:20] == pytest.approx(theirs[:20], rel=1e-5)
    assert summary["eval_perplexity"] == pytest.approx(math.exp(float(sum(losses)) / sum(counts)), rel=0.02)
    assert summary["eval_perplexity"] < 0.95 * math.exp(theirs[0])

    adapter = summary["model"]
    loaded = peft.PeftModel.from_pretrained(classes.from_pretrained(start, attn_implementation="eager"), adapter).eval()
    assert peft.get_peft_model_state_dict(loaded).keys() == peft.get_peft_model_state_dict(plain).keys()
    ids = torch.arange(5, 37).unsqueeze(0)
    with torch.no_grad():  # not the matrices: AdamW moves an element by its gradient's sign, however small that is
        probabilities = [network(ids).logits.softmax(-1) for network in (loaded, plain.eval())]
    torch.testing.assert_close(*probabilities, rtol=0, atol=0.01)
    answer = transformers.pipeline("text-generation", model=adapter)(messages[0][:1], max_new_tokens=8, do_sample=False)
    assert [message["role"] for message in answer[0]["generated_text"]] == list(roles)


def test_frozen_parameters_stay(folder: Path, trained: dict[str, Any]) -> None:
    changes = {"model": {"path": trained["model"]}, "train__steps": 2, "train__freeze": ["model.layers.0.*"]}
    summary = small_runs.train_here(document(folder, **changes, checkpoint__every_steps=None), "frozen")
    before, after = (load_file(Path(place["model"]) / "model.safetensors") for place in (trained, summary))
    frozen = {name for name in before if name.startswith("model.layers.0.")}
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen


def test_only_answers_of_chats_are_learnt(folder: Path, tmp_path: Path) -> None:
    tokenizer = write_with_template(folder / "tokenizer", tmp_path / "tokenizer")
    corpus = tmp_path / "chats.jsonl"
    corpus.write_text(json.dumps({"messages": CHAT}) + "\n")
    shards(tmp_path, corpus, chat="messages", evaluation_corpus=str(corpus), splits=("train",))
    dataset = open_dataset(str(tmp_path / "train"))
    layout = record_layout(dataset.manifest.features, 32)
    data = (tmp_path / "train" / dataset.shards[0].name).read_bytes()
    ids, targets = (read_column(layout, data, name)[0] for name in ("input_ids", "targets"))
    assert tokenizer.convert_ids_to_tokens(ids[targets > 0].tolist()) == ["w3", "w4", "[SEP]"] * 2
    corpus.write_text(json.dumps({"messages": CHAT[:1]}) + "\n")
    with pytest.raises(BadInput, match=r"chats\.jsonl:1: the chat has no answer \(a message of role assistant"):
        shards(tmp_path, corpus, chat="messages", evaluation_corpus=str(corpus), splits=("train",), overwrite=True)
    with pytest.raises(BadInput, match="the tokenizer has no chat template"):
        shards(folder / "chats", corpus, chat="messages", tokenizer=str(folder / "tokenizer"))
