"""The guest agent's reading of ssh keys in metadata: who may enter a host."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "images" / "host" / "guest-agent.py"
    spec = importlib.util.spec_from_file_location("guest_agent", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_keys_of_all_sources_are_gathered_by_user(agent: ModuleType) -> None:
    node = "\nme:ssh-rsa AAAA me\nyou:ssh-ed25519 BBBB you"
    project = "me:ssh-rsa CCCC me\n\n"
    mine, yours = ["ssh-rsa AAAA me", "ssh-rsa CCCC me"], ["ssh-ed25519 BBBB you"]
    assert agent.parse_keys([node, project]) == {"me": mine, "you": yours}
