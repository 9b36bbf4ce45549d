"""The first twenty steps of each family equal those of transformers' own modules on CPU torch, and three batches are
one program. The models are tiny and random; a decoder's packed documents equal the same documents one by one."""

import copy
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
import transformers
from torch import Tensor

from tests.nightly import others_at_night
from tests.xla_flags import COMPILE_FAST
from training.backends.torch_xla import internals
from training.config import Model, Train
from training.data.formats.dataset import IGNORED
from training.errors import BadInput
from training.models.hugging_face import SCANNED, ModelRequirements
from training.models.torch.attention import Linear
from training.models.torch.layer_scan import LayerScan, _RotateHalf, choose_layers, find_layers, group_layers
from training.models.torch.network import build, move, patch_modules
from training.optim.adamw import AdamWSettings
from training.optim.adamw_torch import AdamWTorch
from training.registry import TASKS, load

os.environ.setdefault("XLA_FLAGS", COMPILE_FAST)  # read at torch_xla's first program

VOCABULARY, ROWS, LENGTH, PLACES = 64, 2, 16, 3
CUTS = ([7, 5, 4], [9, 6])  # tokens of the documents of each row; the second row ends in padding
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 24, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
WINDOWED = {**GROUPED, "head_dim": 16, "sliding_window": 4}
ENCODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), SMALL),
    "electra": {**SMALL, "embedding_size": 16},
    "albert": {**SMALL, "embedding_size": 16},
    "distilbert": {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "modernbert": {**SMALL, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "deberta-v2": {
        **SMALL, "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
        "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    },
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 24},
    "llama": {**GROUPED, "tie_word_embeddings": True, "pad_token_id": 3},
    "mistral": WINDOWED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": WINDOWED,
    "gemma3_text": WINDOWED,
    **dict.fromkeys(("qwen2", "phi", "phi3", "olmo2"), GROUPED),
}
TASK_OF = {
    "mlm": "MaskedLM", "classification": "SequenceClassification", "multi-label": "SequenceClassification",
    "token-classification": "TokenClassification", "causal-lm": "CausalLM",
}  # fmt: skip
CASES = [
    *(("mlm", family) for family in ENCODERS),
    *(("classification", family) for family in (*ENCODERS, "gpt2", "llama", "gemma2")),
    *(("multi-label", family) for family in ("bert", "distilbert", "modernbert", "llama")),
    *(("token-classification", family) for family in (*ENCODERS, "gpt2", "llama")),
    *(("causal-lm", family) for family in DECODERS),
]


def write_model(folder: Path, task: str, family: str, **sizes: Any) -> str:
    """A random model of a family, without dropout, as save_pretrained writes it: with another head for a classifier."""
    head = "CausalLM" if family in DECODERS else "MaskedLM"
    values = ENCODERS.get(family) or DECODERS[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**values, **sizes})
    network = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    place = folder / f"{family}-{task}"
    network.save_pretrained(place)
    return str(place)


def batch(task: str, number: int) -> dict[str, np.ndarray]:
    """Rows of a task, other ones for each number."""
    random = np.random.default_rng(number)
    ids = random.integers(5, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    if task == "mlm":
        positions = np.sort(np.stack([random.permutation(LENGTH)[:PLACES] for _ in range(ROWS)]), axis=1)
        labels = random.integers(5, VOCABULARY, (ROWS, PLACES))
        return {"input_ids": ids, "positions": positions.astype(np.int32), "labels": labels.astype(np.int32),
                "weights": np.ones((ROWS, PLACES), np.float32)}  # fmt: skip
    if task != "causal-lm":
        mask = (np.arange(LENGTH) < random.integers(6, LENGTH + 1, (ROWS, 1))).astype(np.int32)
        labels, weights = random.integers(0, 3, ROWS), np.ones(ROWS, np.float32)
        if task == "multi-label":
            labels = random.integers(0, 2, (ROWS, 3))
        if task == "token-classification":
            begins = (mask > 0) & (random.random((ROWS, LENGTH)) < 0.7)
            labels = np.where(begins, random.integers(0, 3, (ROWS, LENGTH)), IGNORED)
            weights = begins.astype(np.float32)
        ids, labels = np.where(mask, ids, 0).astype(np.int32), labels.astype(np.int32)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "weights": weights}
    places, weights = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.float32)
    for row, start, count in documents():
        places[row, start : start + count] = np.arange(count)
        weights[row, start : start + count - 1] = 1
    labels = np.roll(ids, -1, axis=1) * (weights > 0)
    return {"input_ids": ids, "position_ids": places, "labels": labels.astype(np.int32), "weights": weights}


def documents() -> list[tuple[int, int, int]]:
    """(row, first place, tokens) of every document."""
    return [(row, sum(cuts[:index]), count) for row, cuts in enumerate(CUTS) for index, count in enumerate(cuts)]


def tensors(task: str, number: int = 0, device: Any = "cpu") -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in batch(task, number).items()}


def gradients_of(loss: Tensor, values: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """In this thread: earlier tests made threads for the CPU alone."""
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(loss, list(values), allow_unused=True, materialize_grads=True)


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients]).norm()


def their_loss(task: str, network: Any, rows: dict[str, Tensor]) -> Tensor:
    ids = rows["input_ids"].long()
    if "attention_mask" in rows:
        labels = rows["labels"].float() if task == "multi-label" else rows["labels"].long()
        predictions = rows["weights"].sum() * (3 if task == "multi-label" else 1)
        return network(input_ids=ids, attention_mask=rows["attention_mask"], labels=labels).loss * predictions
    if task == "mlm":
        labels = torch.full_like(ids, -100).scatter(1, rows["positions"].long(), rows["labels"].long())
        return network(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss * ROWS * PLACES
    total = torch.zeros(())
    for row, start, count in documents():
        document = ids[row : row + 1, start : start + count]
        total = total + network(input_ids=document, labels=document, use_cache=False).loss * (count - 1)
    return total


def train(network: Any, loss_of: Callable[[int], Tensor]) -> list[float]:
    """Updates all parameters twenty times by AdamW, and returns the loss of each step."""
    parameters = dict(network.named_parameters())
    optimizer = AdamWTorch(AdamWSettings(weight_decay=0.0), parameters)
    losses = []
    for step in range(20):
        loss = loss_of(step)
        gradients = gradients_of(loss, parameters.values())
        scalars = torch.tensor((1 / LENGTH, 1e-3, *optimizer.step_scalars(step))).to(loss.device)
        with torch.no_grad():
            optimizer.update(parameters, gradients, *scalars)
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def open_network(folder: Path, task: str, family: str) -> Any:
    labels = None if task in ("mlm", "causal-lm") else ("a", "b", "c")
    needs = ModelRequirements(VOCABULARY, 0, LENGTH, TASKS[task].head, labels)
    return build(Model(path=write_model(folder, task, family)), needs, dropout=0.0, seed=1)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str, str], Any]:
    return partial(open_network, tmp_path)


BY_DAY = (
    ("mlm", "deberta-v2"), ("causal-lm", "llama"), ("causal-lm", "gemma2"), ("causal-lm", "gemma3_text"),
    ("multi-label", "llama"), ("token-classification", "bert"), ("token-classification", "deberta-v2"),
)  # fmt: skip


@pytest.mark.parametrize("case", others_at_night(CASES, BY_DAY), ids="-".join)
def test_the_first_steps_are_those_of_transformers(
    opened: Callable[[str, str], Any], tmp_path: Path, case: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, family = case
    device = torch_xla.device()
    network = opened(task, family)
    network.save_pretrained(tmp_path / "same")
    own = getattr(transformers, f"AutoModelFor{TASK_OF[task]}")
    plain = own.from_pretrained(tmp_path / "same", attn_implementation="eager").train()
    plain.config.pad_token_id = 0  # the data's
    expected = their_loss(task, plain, tensors(task))
    names = [name for name, _ in plain.named_parameters()]
    theirs = gradients_of(expected, plain.parameters())
    remat: Any = "layers" if family in ("llama", "gpt2") else None
    patch_modules(network, remat, default="none", barrier=xm.optimization_barrier_)
    move(network, device)
    if family == "llama":
        monkeypatch.setattr("training.tasks.torch._WHOLE_LOGITS", 10 * VOCABULARY)  # the head in 4 pieces
    sums = load(TASKS[task].torch)
    graphs: list[int] = []
    seen: list[tuple[Tensor, list[Tensor]]] = []
    for number in range(3):
        rows = tensors(task, number, device)
        torch_xla.sync()
        before = xla_metrics.counter_value("UncachedCompile") or 0
        loss = sums(network, rows)[0][0]
        gradients = gradients_of(loss, network.parameters())
        torch_xla.sync()
        graphs.append((xla_metrics.counter_value("UncachedCompile") or 0) - before)
        seen.append((loss.cpu(), [gradient.cpu() for gradient in gradients]))
    assert graphs[1:] == [0, 0], "three batches are one program"
    assert seen[0][0].item() == pytest.approx(expected.item(), rel=1e-6)
    assert [name for name, _ in network.named_parameters()] == names
    for name, ours, their in zip(names, seen[0][1], theirs, strict=True):
        assert (ours - their).norm() <= 1e-6 * norm_of(theirs), name
    losses = train(plain, lambda step: their_loss(task, plain, tensors(task, step)))
    assert train(network, lambda step: sums(network, tensors(task, step, device))[0][0]) == pytest.approx(losses, 1e-5)


@pytest.mark.parametrize("remat", ["none", "attention", "layers"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_our_attention_is_that_of_hugging_face_whatever_is_recomputed(
    opened: Callable[[str, str], Any], family: str, remat: Any
) -> None:
    """Padding included."""
    theirs = opened("mlm", family)
    ours = copy.deepcopy(theirs)
    assert patch_modules(ours, remat, default="none", barrier=xm.optimization_barrier_) is not None
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ids = torch.randint(1, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 9, 1]).unsqueeze(1)).long()
    found = []
    for network in (theirs, ours):
        logits = network(input_ids=ids, attention_mask=mask).logits
        loss = (logits * mask.unsqueeze(-1)).square().sum()
        found.append([logits, *gradients_of(loss, [each for each in network.parameters() if each.requires_grad])])
    for theirs_value, ours_value in zip(*found, strict=True):
        torch.testing.assert_close(ours_value, theirs_value, rtol=1e-4, atol=1e-5)


def test_linear_layers_under_autocast_are_those_of_torch() -> None:
    theirs, ours = torch.nn.Linear(24, 12), Linear(24, 12)
    ours.load_state_dict(theirs.state_dict())
    found = []
    for layer in (theirs, ours):
        values = torch.linspace(-1, 1, 3 * 16 * 24).reshape(3, 16, 24).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = layer(values)
        found.append([result, *torch.autograd.grad(result.float().square().sum(), [values, *layer.parameters()])])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("frozen", [False, True])
def test_logits_in_pieces_have_the_same_loss_and_gradients(
    opened: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    """Pieces of 5 tokens, so that the last is smaller; the loss is scaled as accumulated batches are."""
    sums, network = load(TASKS["causal-lm"].torch), opened("causal-lm", "qwen2")
    patch_modules(network, None, default="none", barrier=lambda _tensors: None)
    network.lm_head.weight.requires_grad_(not frozen)
    rows = tensors("causal-lm")
    trained = [value for value in network.parameters() if value.requires_grad]
    widths: list[int] = []
    network.lm_head.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    found = []
    for whole in (1 << 27, 10 * VOCABULARY):
        monkeypatch.setattr("training.tasks.torch._WHOLE_LOGITS", whole)
        total = sums(network, rows)[0]
        gradients = torch.autograd.grad(total[0] / 3, trained)
        with torch.no_grad():
            evaluated = sums(network.eval(), rows)[0]
        network.train()
        assert torch.equal(evaluated, total.detach())
        found.append((total.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    assert widths == [LENGTH] * 2 + [5, 5, 5, 1] * 2, "each piece is computed once"
    assert torch.equal(found[0][0][1:], found[1][0][1:])
    assert found[1][0][0].item() == pytest.approx(found[0][0][0].item(), rel=1e-6)
    assert (found[1][1] - found[0][1]).norm() <= 1e-6 * found[0][1].norm()


def test_evaluated_pieces_have_no_gradient(opened: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sums, network = load(TASKS["causal-lm"].torch), opened("causal-lm", "qwen2").eval()
    patch_modules(network, None, default="none", barrier=lambda _tensors: None)
    move(network, torch_xla.device())
    rows = tensors("causal-lm", device=torch_xla.device())
    products = []
    for whole in (1 << 27, 10 * VOCABULARY):
        monkeypatch.setattr("training.tasks.torch._WHOLE_LOGITS", whole)
        with torch.no_grad():
            products.append(internals.program_text([sums(network, rows)[0]]).count(" dot("))
    assert products[1] == products[0] + 3, "four pieces of the head in place of one"


@pytest.mark.parametrize("family", SCANNED)
def test_half_rotations_are_those_of_the_family_without_padding(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Loads transformers' module once more: an earlier scan may have put ours into the first one."""
    spec = importlib.util.find_spec(f"transformers.models.{family}.modeling_{family}")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.rotate_half is not _RotateHalf.apply
    values, factors = torch.randn(2, 3, 8).double(), torch.randn(2, 3, 8).double()
    results, pads = [], []
    for rotate in (module.rotate_half, _RotateHalf.apply):
        for device in ("cpu", torch_xla.device()):
            given = values.to(device).requires_grad_()
            rotated = rotate(given)
            with torch.autograd.set_multithreading_enabled(False):
                (gradient,) = torch.autograd.grad(rotated, given, factors.to(device))
            if device == "cpu":
                results.append((rotated.detach(), gradient))
            else:
                pads.append(internals.program_text([gradient]).count(" pad("))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert pads[0] > 0 == pads[1]


@pytest.mark.parametrize("family", others_at_night(SCANNED, ("llama",)))
@pytest.mark.parametrize("frozen", others_at_night(("nothing", "self_attn", "embed_tokens"), ("nothing", "self_attn")))
def test_layers_as_a_scan_have_the_same_loss_and_gradients(
    opened: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch, family: str, frozen: str
) -> None:
    sums, device = load(TASKS["causal-lm"].torch), torch_xla.device()
    lines: list[int] = []
    for count in (2, 4):
        monkeypatch.setitem(DECODERS, family, {**DECODERS[family], "num_hidden_layers": count})
        network = opened("causal-lm", family)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(frozen not in name)
        values = dict(network.named_parameters())
        rows = tensors("causal-lm")
        expected = sums(network, rows)[0][0]
        wanted = {name: value for name, value in values.items() if value.requires_grad}
        theirs = dict(zip(wanted, torch.autograd.grad(expected, list(wanted.values())), strict=True))
        layers = find_layers(network)
        assert layers == "model.layers"
        groups = group_layers(values, layers)
        network.set_submodule(layers, LayerScan(network.model.layers, internals.loop_over, lambda _name, value: value))
        for stacked, members in groups.items():
            network.get_parameter(stacked).data = torch.stack([values[name].detach() for name in members])
            assert wanted.keys().isdisjoint(members) or wanted.keys() >= set(members)
        move(network, device)
        trained = {name: value for name, value in network.named_parameters() if value.requires_grad}
        loss = sums(network, {name: array.to(device) for name, array in rows.items()})[0][0]
        gradients = gradients_of(loss, trained.values())
        lines.append(len(internals.program_text([loss, *gradients]).splitlines()))
        torch_xla.sync()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        norm = norm_of(theirs.values())
        for name, gradient in zip(trained, gradients, strict=True):
            their = [theirs.pop(member) for member in groups.get(name, [name])]
            assert (gradient.cpu() - (torch.stack(their) if name in groups else their[0])).norm() <= 1e-6 * norm, name
        assert not theirs
    assert lines[0] == lines[1], "the program does not grow with the number of layers"


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma2", {}), ("llama", {"attention_dropout": 0.1}), ("llama", {"num_hidden_layers": 1}), ("gpt2", {})],
)
def test_layers_that_differ_or_have_dropout_do_not_run_as_a_scan(
    opened: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setitem(DECODERS, family, {**DECODERS[family], **changes})
    network = opened("causal-lm", family)
    rate = changes.get("attention_dropout", 0.0)
    for module in network.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = rate
    assert choose_layers(network, Train(steps=1, global_batch_size=1)) is None
    with pytest.raises(BadInput, match="can't run as a scan"):
        choose_layers(network, Train(steps=1, global_batch_size=1, scan=True))


def test_a_network_that_looks_ahead_or_has_too_few_positions_is_refused_in_one_line(tmp_path: Path) -> None:
    needs = ModelRequirements(VOCABULARY, 0, LENGTH, TASKS["causal-lm"].head, None)
    config = {"model_type": "bert", "architectures": ["BertLMHeadModel"], **SMALL}
    looking_ahead = r"^model\.config can't be trained here: .* lets a token see later ones"
    with pytest.raises(BadInput, match=looking_ahead) as caught:
        build(Model(config=config), needs, dropout=0.0, seed=1)
    assert len(str(caught.value).splitlines()) == 1
    too_long = ModelRequirements(VOCABULARY, 0, 25, TASKS["causal-lm"].head, None)
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **GROUPED}
    with pytest.raises(BadInput, match="rows have 25 tokens, but the model has only 24 positions"):
        build(Model(config=llama), too_long, dropout=0.0, seed=1)
