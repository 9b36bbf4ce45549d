"""YAML with comments: every reader gets the values that were written."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from launcher.gke.commented_yaml import Commented, dump, dump_documents, strip_comments
from launcher.shell import find
from tests.training.test_yaml_file import same

# Strings that some reader does not read as strings if they are not quoted.
AMBIGUOUS = [
    "1e-4", "1E4", "0o17", "0x1F", "0b1", "010", "1_000", "1:30", "1:30:45.5", "+1", "-1", ".5", "5.", "0.1.2",
    "16Gi", ".inf", "-.Inf", ".NaN", "yes", "No", "ON", "off", "y", "N", "true", "False", "NULL", "null", "~",
    "=", "<<", "-", "--", "---", "...", "?", ":", "|", ">", "*", "&", "!", "%", "@", "`", "[x]", "{y}", "'q'",
    '"d"', "a:", "-a", "#c", "!t", "&a", "*b", "2001-01-01", "2001-12-14t21:59:43.10-05:00",
]  # fmt: skip
ODD = [
    "", " ", "a: b", "a #b", "? b", "- a", "trailing ", "\ttab", "a\n", "a\n\nb\n", "a\n\n", " a\n", "a\r\nb", "\x07",
    "\x07\n", "\x85", "\u2028", "\ufeff", "é", "\U0001f600", "word " * 60,
]  # fmt: skip
PLAIN = ["demo", "tpu-launch/run", "/etc/tpu-launch", "$(NAME)", "v3-32", "e1", "cloud.google.com/gke-tpu-topology"]

text = st.text() | st.sampled_from([*AMBIGUOUS, *ODD, *PLAIN])
values = st.recursive(
    text | st.integers() | st.booleans() | st.just({}) | st.just([]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


def ruamel(version: tuple[int, int]) -> Callable[[str], Any]:
    def read(document: str) -> Any:
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        return reader.load(document)

    return read


READERS = {"PyYAML, YAML 1.1": yaml.safe_load, "ruamel, 1.1": ruamel((1, 1)), "ruamel, 1.2": ruamel((1, 2))}


@settings(max_examples=300)
@given(st.dictionaries(text, values, max_size=4) | st.lists(values, max_size=4))
def test_python_readers_get_the_written_values(value: Any) -> None:
    node = value
    if isinstance(value, dict):
        node = {key: Commented(inner, "what it is for, at some length " * 5) for key, inner in value.items()}
    document = dump(node)
    assert strip_comments(node) == value
    for name, read in READERS.items():
        assert same(read(document), value), name


def test_kubectl_gets_the_written_values(tmp_path: Path) -> None:
    """Reads with Go. Leaves out a line separator that Go writes in a form that Python's readers fold."""
    values = [value for value in [*AMBIGUOUS, *PLAIN, *ODD] if value != "\x85"]
    strings = {f"key-{number}": value for number, value in enumerate(values)}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo"}, "data": strings}
    (tmp_path / "object.yaml").write_text(dump(document))
    (tmp_path / "kustomization.yaml").write_text("resources: [object.yaml]\n")
    built = subprocess.check_output([find("kubectl"), "kustomize", str(tmp_path)], text=True, timeout=60)
    # Read all scalars as text: a value that Go took for a number or a boolean is written differently.
    assert yaml.load(built, yaml.BaseLoader)["data"] == strings


def test_comments_are_above_their_values() -> None:
    items = Commented([Commented("x", "of an item")], "of a list")
    inner = {"first": Commented("a", "of the first key"), "second": items}
    node = {"items": [Commented(inner, "of the whole item")], "text": Commented("a\nb\n", "of a block")}
    assert dump_documents([Commented(node, "top"), {"next": 1}], "heading") == (
        "# heading\n# top\nitems:\n  # of the whole item\n  # of the first key\n  - first: a\n    # of a list\n"
        "    second:\n      # of an item\n      - x\n# of a block\ntext: |\n  a\n  b\n---\nnext: 1\n"
    )
