"""Scalars have their YAML 1.2 meaning, every mistake its line, and what is dumped means the same to every reader."""

from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from training.yaml_file import ConfigError, Document, parse

TRICKY = [
    "", " ", "~", "null", "Null", "yes", "No", "on", "OFF", "y", "n", "true", "True", "010", "0o10", "0x1f",
    "0b1", "1_000", "+1", "1:30", "190:20:30", "1e-4", "1E4", "1.", ".5", "1e4", "12e03", ".inf", "-.INF",
    ".nan", "=", "<<", "2001-12-14", "2001-12-14 21:59:43.10 -5", "- a", "a: b", "a #b", "#a", "&a", "*a",
    "!a", "%a", "@a", "`a", "{", "[", "'", '"', "|", ">", "?", "---", "...", "\t", "a\tb", "a\nb", "a\n",
    "\r", "\x85", "\u2028", "\ufeff", "\xe9", "\U0001f600", "a:", ":a", "-", "a" * 200, "a " * 100, "0.1.2",
    "1e", "0o8", "09", "-0", "1_", "_1", "+.inf",
]  # fmt: skip
strings = (
    st.sampled_from(TRICKY)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
    | st.from_regex(r"[-+]?[0-9_.:eExobn]{1,8}", fullmatch=True)
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings
parts = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3), max_leaves=6
)
values = st.dictionaries(strings, parts, max_size=4)


def same(value: Any, other: Any) -> bool:
    """Equal, and of the same types: 1 is not 1.0, and not true."""
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return list(value) == list(other) and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)


@given(values)
@example({text: text for text in TRICKY})
@example({"numbers": [1e-05, 1e22, 1e16, 5e-324, 1.5, -0.0, 10**30]})
def test_what_is_dumped_means_the_same_in_yaml_1_1_and_1_2(value: dict[str, Any]) -> None:
    """PyYAML reads YAML 1.1, `parse` 1.2."""
    text = Document("run.yaml", value, {}).dump()
    assert same(yaml.safe_load(text), value), text
    assert same(parse(text, "run.yaml").value, value), text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E4", 1e4), ("010", 10), ("0o10", 8), ("0x10", 16), ("1:30", "1:30"),
        *((word, word) for word in ("yes", "no", "on", "off")), ("true", True), ("null", None), ("~", None),
        ("'1'", "1"),
    ],
)  # fmt: skip
def test_scalars_mean_what_yaml_1_2_says(text: str, value: Any) -> None:
    assert same(parse(f"key: {text}\n", "run.yaml").value, {"key": value})
    assert same(parse("", "run.yaml", [f"key={text}"]).value, {"key": value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", "f:3: not valid YAML: expected ',' or ']'"),
        ("a: 1\n b: 2\n", "f:2: not valid YAML: mapping values are not allowed here"),
        ("a: 1\nb: 2\na: 3\n", "f:3: key 'a' is given twice, first on line 1"),
        ("a:\n  b: 1\n  b: 2\n", "f:3: key 'b' is given twice, first on line 2"),
        ("- a\n", "f:1: expected `key: value` lines at the top"),
        ("a: 1\n---\nb: 2\n", "f:2: not valid YAML: but found another document"),
        ("a: !!python/name:os.system x\n", "f:1: not valid YAML: could not determine a constructor"),
        ("a: 1\nb: &b [*b]\n", "f:2: not valid YAML: this part contains itself"),
        ("a: \x01", "f:1: not valid YAML: "),
        ("a: 1\n1: x\n", "f:2: the key '1' is not text"),
        ("a:\n  ~: x\n", "f:2: the key '~' is not text"),
        ("a:\n- 2020-01-01: x\n", "f:2: the key '2020-01-01' is not text"),
        ("? [1]\n: x\n", "f:1: the key a list or section is not text"),
        ("a: 1\nb: &b\n  <<: *b\n", "f:2: not valid YAML: this part contains itself"),
        ("a: 1\nb: " + "[" * 5000, "f:2: more than 32 sections or lists within each other"),
        ("a: 1\nb: " + "[" * 40 + "]" * 40, "f:2: more than 32 sections or lists within each other"),
        ("a: 2020-99-99\n", "f:1: a: '2020-99-99' is not a value of type timestamp"),
        ("a: " + "9" * 5000, "f:1: a: '9999"),
        ("a: !!int ''\n", "f:1: a: '' is not a value of type int"),
        ("a: !!bool x\n", "f:1: a: 'x' is not a value of type bool"),
        ("b: 1\na: .inf\n", "f:2: a: should be a finite number, not .inf"),
        ("b: 1\na: 1e999\n", "f:2: a: should be a finite number, not 1e999"),
        ("a: -.inf\n", "f:1: a: should be a finite number, not -.inf"),
        ("a: .nan\n", "f:1: a: should be a finite number, not .nan"),
        ('b: 1\na: "\\ud800"\n', "f:2: a: '\\ud800' has a character that can't be written"),
        ('b: 1\na: "\\0"\n', "f:2: a: '\\x00' has a character that can't be written"),
        ("b: 1\na: \0\n", "f:2: not valid YAML: character U+0000 is not allowed"),
        ('b: 1\na: "\\U00110000"\n', "f:2: not valid YAML"),
        ("# x\n%YAML 1.1\n---\na: 010\n", "f:2: files are read as YAML 1.2: remove %YAML 1.1"),
    ],
)
def test_what_no_file_may_hold_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, "f")
    assert str(raised.value).startswith(message)


def test_places_are_lines_of_the_file_or_the_option_that_set_them() -> None:
    document = parse("a:\n  b: 1\n  c:\n  - x\n  - y\nd: 2\n", "run.yaml", ["a.b=3", "e.f=1"])
    assert document.value == {"a": {"b": 3, "c": ["x", "y"]}, "d": 2, "e": {"f": 1}}
    paths: list[tuple[str | int, ...]] = [("a",), ("a", "b"), ("a", "c", 1), ("d",), ("e", "f"), ("g",)]
    places = ["run.yaml:1", "--set a.b", "run.yaml:5", "run.yaml:6", "--set e.f", "run.yaml:1"]
    assert list(map(document.place, paths)) == places


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train", "--set train: expected key=value, for example train.steps=100"),
        (".a=1", "--set .a=1: expected key=value"),
        ("a=[1", "--set a=[1: '[1' is not a YAML value"),
        ("d.e=1", "--set d.e: 'd' is not a section"),
        *((f"a.b={text}", "--set a.b=") for text in (".inf", '"\\ud800"', "[" * 5000, "{1: 2}", "2020-99-99")),
    ],
)
def test_a_wrong_override_is_named_and_its_value_read_as_strictly(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse("d: 2\n", "run.yaml", [override])
    assert str(raised.value).startswith(message)


def test_merged_keys_are_read() -> None:
    text = "base: &base {x: 1, y: 1}\nother:\n  <<: *base\n  y: 2\n"
    assert parse(text, "run.yaml").value["other"] == {"x": 1, "y": 2}


def test_aliases_that_multiply_are_refused_and_not_written_out() -> None:
    doublings = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9))
    with pytest.raises(ConfigError, match=r"f:\d: the document has more than 100000 parts"):
        parse(f"a0: &a0 [1]\n{doublings}\n", "f")
