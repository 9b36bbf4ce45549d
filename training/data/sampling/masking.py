"""Masked language modelling: selects the predicted tokens, as a pure function of (seed, epoch, record, position).

For each record, with all random numbers from `training.data.sampling.random_bits`:

  row key    keys(key(seed, "masking", epoch), record)
  rank       of a candidate (a position whose id is not special): output `position` of the generator that starts at the
             row key, its lowest bits replaced by the position. The n candidates of lowest rank are predicted; n is
             candidates * percent / 100 rounded to the nearest, at least 1 and at most `predictions`
  kind       output (length + position) of the same generator: its upper 32 bits times 10, divided by 2**32. 0 to 7: the
             id becomes the mask; 8: it becomes a random ordinary id; 9: it stays (80/10/10; Devlin et al. 2019,
             section 3.1)
  random id  output (2 * length + position): its upper 32 bits times the number of ordinary ids, divided by 2**32, is
             the index into the ordinary ids in ascending order

The number of predictions is exact, not a coin for each token: every row weighs the same, and `predictions` is a small
static shape. A row's positions are ascending; an unused prediction has position 0, label 0 and weight 0. Special tokens
are never predicted and never inserted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data.sampling import random_bits
from training.errors import BadInput

Ids = npt.NDArray[np.int32]

# Names of the token that ends a document, where a tokenizer's configuration has no eos_token.
END_OF_TEXT = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]", "<sep>")


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer's special ids and size."""

    mask: int  # the id that hides a token; -1 if the tokenizer has none and the rows need none
    pad: int  # the id of padding; `end` for rows of documents if the tokenizer has none
    special: frozenset[int]  # all ids that are never predicted, `mask` and `pad` among them
    vocabulary: int  # the number of ids
    end: int | None = None  # the id that ends a document; None unless rows of documents asked for it

    def ordinary(self) -> npt.NDArray[np.int64]:
        """Returns all ids that are not special, ascending. (ids,)"""
        return np.setdiff1d(np.arange(self.vocabulary), sorted(self.special))


def special_tokens(
    tokenizer: Mapping[str, Any], url: str, rows: str = "packed", pad: str | None = None, end: str | None = None
) -> SpecialTokens:
    """Returns the special tokens in the parsed content of the tokenizer.json at `url`. Rows of documents need an
    end-of-text token (`end`, if the tokenizer's configuration names it), which is also the padding if there is no
    other; packed rows a mask and a padding token; labelled rows padding: a usual one, else `pad`, else `end`. Raises
    BadInput without one; ValueError, KeyError, TypeError, AttributeError when it is no content of a tokenizer.json."""
    added = tokenizer.get("added_tokens", [])
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    vocabulary = tokenizer["model"]["vocab"]
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    all_ids = [*ids, *(token["id"] for token in added)]
    if wrong := [number for number in all_ids if type(number) is not int or not 0 <= number < 1 << 31]:
        raise ValueError(f"a token has the id {wrong[0]!r:.80}")
    count = max(all_ids) + 1

    def find(role: str, names: tuple[str, ...], absent: int | None = None) -> int:
        """Returns the id of the first of `names` that is special, else `absent`. Raises BadInput if that is None."""
        for name in names:
            if name in special:
                return int(special[name])
        if absent is not None:
            return absent
        raise BadInput(
            f"{url}: the tokenizer has no {role} token (one of {', '.join(names)}): make one with `tpu-train tokenizer`"
        )

    last = find("end-of-text", (end,) if end else END_OF_TEXT) if rows == "documents" else None
    mask = find("mask", ("[MASK]", "<mask>"), None if rows == "packed" else -1)
    padding = find("padding", ("<pad>", "[PAD]", "<|pad|>", *(own for own in (pad, end) if own and last is None)), last)
    return SpecialTokens(mask, padding, frozenset(special.values()), count, last)


@dataclass(frozen=True)
class Masking:
    """How many tokens of a row are predicted."""

    percent: int = 15  # of a row's ordinary tokens
    predictions: int | None = None  # the static number of predictions per row; None: as many as a full row needs

    def places(self, length: int) -> int:
        """Returns the static number of predictions in each row of `length` tokens; `length` at most."""
        return min(length, self.predictions or max(1, -(-length * self.percent // 100)))


@dataclass(frozen=True)
class Masked:
    """Masked rows."""

    input_ids: Ids  # (n, length), with masks
    positions: Ids  # (n, places), ascending; 0 where nothing is predicted
    labels: Ids  # (n, places), the original ids at these positions; 0 where nothing is predicted
    weights: npt.NDArray[np.float32]  # (n, places), 1 for a prediction and 0 where there is none


class Masker:
    """Masks rows for one tokenizer and seed. A call is a pure function; the object only caches its tables."""

    def __init__(self, masking: Masking, tokens: SpecialTokens, seed: int) -> None:
        """Raises BadInput when all of the tokenizer's ids are special."""
        self.masking, self.tokens, self.seed = masking, tokens, seed
        self._ordinary = tokens.ordinary().astype(np.int32)
        self._special = np.isin(np.arange(tokens.vocabulary), sorted(tokens.special))
        if not len(self._ordinary):
            raise BadInput("the tokenizer has special tokens only")

    def __call__(self, input_ids: Ids, epochs: npt.ArrayLike, records: npt.NDArray[np.int64]) -> Masked:
        """Returns masked copies of rows (n, length). epochs: one for all rows, or (n,); records: (n,)."""
        count, length = input_ids.shape
        places = self.masking.places(length)
        of_epochs = random_bits.keys(random_bits.key(self.seed, "masking"), np.broadcast_to(epochs, records.shape))
        row = random_bits.keys(of_epochs, records)  # (n,)

        bits = np.uint64(max(1, (length - 1).bit_length()))
        position = np.arange(length, dtype=np.uint64)  # (length,)
        rank = random_bits.counted(row[:, None], position)  # (n, length)
        rank >>= bits
        rank <<= bits
        rank |= position
        special = self._special[input_ids]  # (n, length)
        rank[special] = np.uint64(2**64 - 1)
        if places < length:
            rank.partition(places - 1, axis=1)
        first = np.sort(rank[:, :places], axis=1)  # (n, places) in the order of the draw
        candidates = length - np.count_nonzero(special, axis=1)  # (n,)
        # (n,) predictions of each row; (n, places) which of its places are used
        wanted = np.clip((candidates * self.masking.percent + 50) // 100, 1, places)
        used = np.arange(places) < np.minimum(wanted, candidates)[:, None]

        # (n, places) positions, ascending, unused ones last
        chosen = np.where(used, (first & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64), length)
        chosen.sort(axis=1)
        used = chosen < length
        positions = np.where(used, chosen, 0)
        labels = np.where(used, np.take_along_axis(input_ids, positions, axis=1), 0).astype(np.int32)

        offset = positions.astype(np.uint64)  # (n, places)
        kind = self._draw(row, offset + np.uint64(length), 10)
        random = self._ordinary[self._draw(row, offset + np.uint64(2 * length), len(self._ordinary))]
        replaced = np.where(kind < 8, np.int32(self.tokens.mask), np.where(kind == 8, random, labels))
        masked = input_ids.copy()  # (n, length)
        flat = (positions + np.arange(count)[:, None] * length)[used]
        masked.reshape(-1)[flat] = replaced[used]
        return Masked(masked, positions.astype(np.int32), labels, used.astype(np.float32))

    def _draw(self, row: random_bits.UInts, index: random_bits.UInts, below: int) -> npt.NDArray[np.int64]:
        """Returns random numbers in [0, below): (n, places). row: (n,); index: (n, places)."""
        upper = random_bits.counted(row[:, None], index) >> np.uint64(32)
        return (upper * np.uint64(below) >> np.uint64(32)).astype(np.int64)
