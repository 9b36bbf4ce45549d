"""Attention over long rows equals plain attention: by blocks, in XLA's loops, by the interpreted kernel, by family."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.container.test_family_parity import LENGTH, gradients_of, open_network, tensors
from tests.nightly import others_at_night
from tests.xla_flags import COMPILE_FAST
from training.backends.torch_xla import internals
from training.backends.torch_xla.sharding import DataParallel
from training.backends.torch_xla.splash import splash_attention
from training.distributed.cluster import Cluster
from training.errors import BadInput
from training.models.hugging_face import LONG_ATTENTION
from training.models.torch import long_attention
from training.models.torch.long_attention import Scores, attend, choose_attention, loop_in_python
from training.registry import TASKS, load

os.environ.setdefault("XLA_FLAGS", COMPILE_FAST)  # read at torch_xla's first program

GROUPED = 4, 2  # heads, and groups that share a key
WINDOWS = [(None, None), (None, 0), (100, 0), (5, 5), (64, 200)]


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scores: Scores) -> Tensor:
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    products = (query @ key.transpose(-1, -2)).float() * scores.scale
    if scores.cap:
        products = torch.tanh(products / scores.cap) * scores.cap
    places = torch.arange(query.shape[2], device=query.device)
    distance = places.unsqueeze(1) - places
    seen = segments[:, None, :, None] == segments[:, None, None, :]
    seen = seen if scores.left is None else seen & (distance <= scores.left)
    seen = seen if scores.right is None else seen & (-distance <= scores.right)
    return torch.softmax(products.masked_fill(~seen, torch.finfo(torch.float32).min), -1).to(value.dtype) @ value


def arrays(length: int, seed: int, width: int = 8) -> tuple[list[Tensor], Tensor]:
    """Query, key, value and a gradient of the result; and segments of about 30 tokens."""
    random, (heads, groups) = torch.Generator().manual_seed(seed), GROUPED
    parts = [torch.randn(2, count, length, width, generator=random) for count in (heads, groups, groups, heads)]
    return parts, (torch.rand(2, length, generator=random) < 0.03).int().cumsum(1).int()


def with_gradients(attention: Callable[..., Tensor], parts: list[Tensor], *others: Any) -> list[Tensor]:
    leaves = [part.detach().requires_grad_() for part in parts[:3]]
    result = attention(*leaves, *others)
    with torch.autograd.set_multithreading_enabled(False):
        return [result, *torch.autograd.grad(result, leaves, parts[3])]


def require_close(ours: list[Tensor], theirs: list[Tensor], relative: float) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert (our.cpu().float() - their.float()).abs().max() <= relative * their.float().abs().max()


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(1, 400),
    left=st.none() | st.integers(0, 300),
    right=st.none() | st.integers(0, 300),
    cap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
def test_blocks_give_the_same(length: int, left: int | None, right: int | None, cap: float | None, seed: int) -> None:
    parts, segments = arrays(length, seed)
    scores = Scores(0.3, left, right, cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_attention, "_BLOCK_SCORES", 1)  # blocks of 128 tokens
        ours = with_gradients(attend, parts, segments, scores, loop_in_python)
    require_close(ours, with_gradients(attend_plainly, parts, segments, scores), 1e-5)


@pytest.mark.parametrize("window", others_at_night(WINDOWS, (WINDOWS[1], WINDOWS[3])))
def test_loops_of_xla_and_the_kernel_give_the_same(window: tuple[int | None, int | None]) -> None:
    parts, segments = arrays(512, 0, width=64)
    scores, device = Scores(0.125, *window), torch_xla.device()
    theirs = with_gradients(attend_plainly, parts, segments, scores)
    there = [part.to(device) for part in parts]
    ours = with_gradients(attend, there, segments.to(device), scores, internals.loop_over)
    require_close(ours, theirs, 1e-5)
    kernel: Any = splash_attention(DataParallel(Cluster(0, ("localhost",))), platform="cpu")
    rounded = [part.to(torch.bfloat16) for part in parts]
    theirs = with_gradients(attend_plainly, [part.float() for part in rounded], segments, scores)
    ours = with_gradients(kernel, [part.to(device) for part in rounded], segments.to(device), scores)
    require_close(ours, theirs, 2e-2)  # bf16 has 8 bits


@pytest.mark.parametrize("family", others_at_night(LONG_ATTENTION, ("llama", "gemma2", "modernbert")))
def test_a_family_trains_as_with_its_own_attention(tmp_path: Path, family: str) -> None:
    for task in ("mlm", "classification") if family == "modernbert" else ("causal-lm",):
        network, sums = open_network(tmp_path, task, family), load(TASKS[task].torch)
        found = []
        for wanted in ("plain", "blocks"):
            choose_attention(network, wanted, LENGTH, loop=loop_in_python, kernel="")  # type: ignore[arg-type]
            loss = sums(network, tensors(task))[0][0]
            found.append([loss, *gradients_of(loss, [each for each in network.parameters() if each.requires_grad])])
        require_close(found[1], found[0], 1e-5)


def test_attention_is_chosen_by_length_and_refused_in_one_line(tmp_path: Path) -> None:
    network = open_network(tmp_path, "causal-lm", "llama")
    choose: Any = partial(choose_attention, network, loop=loop_in_python, kernel="no TPU")
    assert choose(None, 2047) is None
    assert choose("plain", 8192) is None
    assert "8,192 tokens: attention is computed block by block (no TPU); scores would" in choose(None, 8192)
    assert "by a Pallas kernel" in choose(None, 8192, kernel=lambda *_: None)
    with pytest.raises(BadInput, match=r"train\.attention: kernel can't be had: no TPU"):
        choose("kernel", 8192)
    network.config.attention_dropout = 0.1
    assert choose(None, 8192) is None
    with pytest.raises(BadInput, match="has dropout"):
        choose("blocks", 8192)
