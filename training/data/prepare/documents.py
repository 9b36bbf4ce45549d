"""Packs whole documents into rows, for next-token prediction: each token's document is stored beside its id.

    documents --batches of about 1 MB--> (ids, targets) of each --best fit, longest first--> rows

Documents of one batch are laid side by side where they fit best, and the rest of a row is padding. A document that is
longer than a row is cut into pieces, each a document of its own. Ends with the tokenizer's end-of-text token, which
texts get unless the tokenizer adds one.
"""

import bisect
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from training.data.formats.dataset import SEGMENTS, TARGETS, Feature, Shard
from training.data.prepare import dataset_writer
from training.data.prepare.dataset_writer import DatasetPlan, Ids
from training.data.prepare.pack import Encode, RowKind
from training.data.tokenizer import Tokenizer


class WholeDocuments(RowKind):
    """Rows of whole documents. The stream is of rows, (n, 3, length): ids, segments and targets."""

    units = 1
    columns: ClassVar[tuple[str, ...]] = (SEGMENTS,)

    def __init__(self, plan: DatasetPlan, tokenizer: Tokenizer, encode: Encode) -> None:
        """Writes nothing yet. `encode`: returns the ids of each text."""
        assert tokenizer.special.end is not None
        self._plan, self._encode, self.more = plan, encode, {"rows": "documents"}
        self._pad, self._end = tokenizer.special.pad, tokenizer.special.end
        self._places, self._used, self._cut = 0, 0, 0
        number = Feature(dtype="uint16", shape=["length"])
        self.features = {**dataset_writer.id_features(plan.vocabulary), **dict.fromkeys(self.columns, number)}

    def encode(self, documents: list[str]) -> Ids:
        """Returns rows, (rows, 3, length): ids, numbers of their documents from 1 (0: padding), and 1 if learnt. Counts
        the places that they fill, for `note`."""
        length = self._plan.length
        pieces = [piece for document in self.tokenize(documents) for piece in self.cut(document, length)]
        rows = best_fit([piece.shape[1] for piece in pieces], length)
        packed = np.zeros((len(rows), 3, length), np.int32)
        packed[:, 0] = self._pad
        for row, members in enumerate(rows):
            start = 0
            for number, member in enumerate(members, 1):
                ids, targets = pieces[member]
                place = slice(start, start + len(ids))
                packed[row, 0, place], packed[row, 1, place], packed[row, 2, place] = ids, number, targets
                start = place.stop
            self._used += start
        self._places += length * len(rows)
        return packed

    def tokenize(self, documents: list[str]) -> list[Ids]:
        """Returns (2, n) for each document: ids, and 1 at tokens that are learnt, else 0."""
        encoded = self._encode(documents)
        whole = [ids if len(ids) and ids[-1] == self._end else np.append(ids, np.int32(self._end)) for ids in encoded]
        return [np.stack([ids, np.ones_like(ids)]) for ids in whole]

    def cut(self, document: Ids, length: int) -> list[Ids]:
        """Returns the pieces of a document, (2, n) each, that go into rows. Counts a cut document, for `note`."""
        self._cut += document.shape[1] > length
        return [document[:, start : start + length] for start in range(0, document.shape[1], length)]

    def write(self, url: str, number: int, units: Ids) -> Shard:
        columns = dict(zip(("input_ids", SEGMENTS, TARGETS), units.transpose(1, 0, 2), strict=True))
        return dataset_writer.write_columns(url, self._plan, self.features, f"{number:05d}", columns)

    def note(self, dropped: int) -> str:
        """Returns how full the rows are, and how many documents were cut."""
        return (
            f"{self._used / max(1, self._places):.1%} of the places filled; {self._cut} documents were longer than "
            f"{self._plan.length} tokens and were cut"
        )


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Returns rows as lists of numbers of documents: the longest document first, each into the fullest row that has
    room for it. `lengths`: tokens of each document, at most `room`."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (places left, row), ascending
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect.bisect_left(free, (lengths[number], -1))
        left, row = free.pop(place) if place < len(free) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        bisect.insort(free, (left - lengths[number], row))
    return rows
