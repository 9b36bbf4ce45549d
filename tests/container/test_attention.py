"""Our self-attention in Hugging Face's networks computes what theirs does, padding included, whatever is recomputed."""

import copy

import pytest
import torch
import torch_xla.core.xla_model as xm

from training.config import Model, Remat
from training.models.hugging_face import ModelRequirements
from training.models.torch.attention import Linear
from training.models.torch.network import build, patch_modules

NEEDS = ModelRequirements(vocabulary=100, pad=0, sequence_length=16)


@pytest.mark.parametrize("remat", ["none", "attention", "layers"])
@pytest.mark.parametrize("name", ["bert-tiny", "roberta-base"])
def test_the_network_and_its_gradients_are_those_of_hugging_face(name: str, remat: Remat) -> None:
    sizes = {"hidden_size": 24, "layers": 2, "heads": 2, "max_positions": 16}
    theirs = build(Model(name=name, **sizes), NEEDS, dropout=0.0, seed=1)
    ours = copy.deepcopy(theirs)
    assert patch_modules(ours, remat, default="none", barrier=xm.optimization_barrier_) is not None
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ids = torch.randint(1, 100, (3, 16), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(16) < torch.tensor([16, 9, 1]).unsqueeze(1)).long()
    found = []
    for network in (theirs, ours):
        logits = network(input_ids=ids, attention_mask=mask).logits
        parameters = [value for value in network.parameters() if value.requires_grad]
        gradients = torch.autograd.grad(
            (logits * mask.unsqueeze(-1)).square().sum(), parameters, allow_unused=True, materialize_grads=True
        )
        found.append([logits, *gradients])
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
