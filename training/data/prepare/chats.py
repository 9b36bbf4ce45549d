"""Renders chats by the tokenizer's own chat template, and marks the tokens of their answers: only those are learnt.

An answer's tokens are those of the content of a message with role `assistant`, and the special token right after it,
which ends the turn.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.data import tokenizer as tokenizers
from training.data.formats.dataset import SEGMENTS, TARGETS
from training.data.prepare.corpus import Corpus, replace_surrogates
from training.data.prepare.dataset_writer import DatasetPlan, Ids
from training.data.prepare.documents import WholeDocuments
from training.data.tokenizer import Tokenizer
from training.errors import BadInput

ANSWER = "assistant"

Messages = Sequence[Mapping[str, Any]]


def chats(corpus: Corpus) -> Iterator[str]:
    """Yields the chats of a corpus, whose rows hold lists of messages, as JSON text. Raises BadInput, with the row's
    place, for a row without such a list (text that holds JSON is none) or without an answer."""
    for number, row in enumerate(corpus.rows(), 1):
        place = getattr(row, "place", None) or f"{corpus.name}: row {number}"
        messages = row.get(corpus.field)
        if messages is None:
            raise BadInput(f"{place} has no {corpus.field!r}, it has: {', '.join(map(repr, row))}. Name it with --chat")
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
        ):
            raise BadInput(f"{place}: {corpus.field!r} is not a list of messages with role and content")
        answers = [message for message in messages if message["role"] == ANSWER]
        if not any(isinstance(answer.get("content"), str) and answer["content"].strip() for answer in answers):
            raise BadInput(
                f"{place}: the chat has no answer (a message of role {ANSWER} with text), so nothing to learn"
            )
        yield replace_surrogates(json.dumps(messages, ensure_ascii=False))


class WholeChats(WholeDocuments):
    """Rows of whole chats. One that is longer than a row is cut at its end."""

    columns = (SEGMENTS, TARGETS)

    def __init__(self, plan: DatasetPlan, tokenizer: Tokenizer, template: Any) -> None:
        """Loads the tokenizer. `template`: the same one as `open_template` returns it, to render chats."""
        super().__init__(plan, tokenizer, lambda _texts: [])
        self._tokenizer, self._template, self._dropped = tokenizers.load(tokenizer), template, 0
        self._special = tokenizer.special.special

    def tokenize(self, documents: list[str]) -> list[Ids]:
        """Returns (2, n) for each chat, which is JSON text: ids, and 1 at tokens of answers, else 0."""
        rendered = [self._render(json.loads(document)) for document in documents]
        encodings = self._tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        return [self._mark(*pair) for pair in zip(encodings, (spans for _, spans in rendered), strict=True)]

    def cut(self, document: Ids, length: int) -> list[Ids]:
        """Returns the beginning of a chat that a row holds; [] if no answer is in it. Counts both, for `note`."""
        self._cut += document.shape[1] > length
        kept = document[:, :length]
        self._dropped += not kept[1, 1:].any()
        return [kept] if kept[1, 1:].any() else []

    def note(self, dropped: int) -> str:
        """Returns how full the rows are, and how many chats were cut, and left out."""
        return f"{super().note(dropped)}; {self._dropped} had no answer left and were left out"

    def _render(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Returns a chat's text, and [begin, end) of each answer in it, in characters. Raises BadInput if the template
        refuses the chat or changes an answer."""
        whole, spans = self._apply(messages), list[tuple[int, int]]()
        for number, message in enumerate(messages):
            answer = (message.get("content") or "").strip()
            if message["role"] != ANSWER or not answer:
                continue
            before = self._apply(messages[:number], add_generation_prompt=True)
            after = len(before) if whole.startswith(before) else spans[-1][1] if spans else 0
            start = whole.find(answer, after)
            if start < 0:
                raise BadInput(f"the chat template does not show the answer {answer!r:.60} as it is: no loss on it")
            spans.append((start, start + len(answer)))
        return whole, spans

    def _apply(self, messages: Messages, **options: Any) -> str:
        """Returns the chat as text by the tokenizer's chat template. Raises BadInput if the template refuses it."""
        try:
            text: str = self._template.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # of the template's own code
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            roles = ", ".join(str(message["role"]) for message in messages)
            raise BadInput(f"the tokenizer's chat template refuses a chat of roles {roles}: {reason:.200}") from None
        return text

    def _mark(self, encoding: Any, spans: Sequence[tuple[int, int]]) -> Ids:
        """Returns (2, n): ids, and 1 at tokens in `spans` of the text and at a special token behind each, else 0."""
        ids, offsets = np.array(encoding.ids, np.int32), np.array(encoding.offsets).reshape(-1, 2)  # (n,), (n, 2)
        targets = np.zeros_like(ids)
        for start, end in spans:
            inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
            targets[inside] = 1
            after = inside[-1] + 1 if len(inside) else len(ids)
            if after < len(ids) and int(ids[after]) in self._special:
                targets[after] = 1
        return np.stack([ids, targets])


def open_template(url: str) -> Any:
    """Returns transformers' tokenizer of a folder. Raises BadInput without transformers or a chat template."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise BadInput("--chat needs the `transformers` package: run it in the image") from None
    with tempfile.TemporaryDirectory() as scratch:
        loaded = AutoTokenizer.from_pretrained(tokenizers.fetch(url, Path(scratch)), local_files_only=True)
    if not loaded.chat_template:
        raise BadInput(f"{url}: the tokenizer has no chat template, which --chat needs: take one of a chat model")
    return loaded
