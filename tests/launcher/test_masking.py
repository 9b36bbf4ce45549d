"""Claims about what is masked in what is kept: every form of a long value, and no more than a short one needs."""

import base64
import html
import json
import shlex
import urllib.parse

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launcher.masking import MASK, SecretMasker

values = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=8, max_size=40).filter(
    lambda value: value == value.strip()
)


@given(values, st.text(max_size=5), st.text(max_size=5))
def test_every_form_of_a_value_is_masked(value: str, before: str, after: str) -> None:
    text = before + value + after
    forms = [
        text.encode(),
        json.dumps({"a": text}).encode(),
        json.dumps({"a": text}, ensure_ascii=False).encode(),
        json.dumps(json.dumps({"a": text})).encode(),
        urllib.parse.quote(text, safe="").encode(),
        urllib.parse.quote(text).encode(),
        urllib.parse.quote_plus(text).encode(),
        urllib.parse.quote(text, safe="").lower().encode() if text.islower() else text.encode(),
        html.escape(text).encode(),
        base64.b64encode(text.encode()),
        base64.urlsafe_b64encode(text.encode()),
        text.encode().hex().encode(),
    ]
    masker = SecretMasker({"TOKEN": value})
    for form in forms:
        assert MASK in masker.mask(form), form
        assert value.encode() not in masker.mask(form)
    for shown in (repr(value), repr(value.encode()), shlex.quote(value)):  # alone, as Python and a shell show it
        assert MASK in masker.mask(shown.encode()), shown


@given(values, values)
def test_a_value_within_another_does_not_keep_the_longer_from_being_masked(one: str, other: str) -> None:
    assume(one != other)
    masker = SecretMasker({"A": one, "B": one + other})
    assert other.encode() not in masker.mask((one + other).encode()).replace(MASK, b"")


@pytest.mark.parametrize(
    ("secrets", "text", "masked"),
    [
        ({"FLAG": "1"}, "step 11 of 100, loss 1.1\nFLAG=1\n", "step 11 of 100, loss 1.1\nFLAG=***\n"),
        ({"FLAG": "1"}, '{"FLAG": "1", "N": "1"} FLAG=\'1\' FLAG=10', '{"FLAG": "***", "N": "1"} FLAG=\'***\' FLAG=10'),
        ({"MODE": "train"}, "train, training, pre-train", "***, training, pre-train"),
        ({"EMPTY": ""}, "all of it stays", "all of it stays"),
        ({"TOKEN": "s3cret-token\n"}, "token: s3cret-token", "token: ***"),
        ({"KEY": "-----BEGIN\nabcdefghij\nxy\n"}, "1 abcdefghij\n2 xy", "1 ***\n2 xy"),
    ],
)
def test_a_short_value_is_masked_only_where_it_is_meant(secrets: dict[str, str], text: str, masked: str) -> None:
    assert SecretMasker(secrets).mask(text.encode()).decode() == masked


def test_bytes_that_are_not_text_are_masked_and_survive() -> None:
    value = b"s3cret\xff\xfe-token".decode(errors="surrogateescape")
    assert SecretMasker({"TOKEN": value}).mask(b"\xfd s3cret\xff\xfe-token \xfc") == b"\xfd *** \xfc"
