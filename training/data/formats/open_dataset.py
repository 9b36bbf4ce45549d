"""Opening a dataset, in either layout, and checking it before anything is rented.

What a dataset is stands in `training.data.formats.dataset`. Framework-free; numpy is needed only for a folder in the
public recipe's layout, which has to be looked through because it has no manifest.
"""

from __future__ import annotations

from training import storage
from training.data.formats.dataset import MANIFEST, Dataset, find_shards, loads, tokenizer_hash
from training.errors import BadInput


def open_dataset(url: str) -> Dataset:
    """Reads and checks `<url>/dataset.json`; a folder in the public recipe's layout has none. Raises BadInput,
    StorageError."""
    try:
        data = storage.read(storage.join(url, MANIFEST))
    except storage.NotFound as error:
        try:
            from training.data.formats import recipe
        except ModuleNotFoundError as missing:  # numpy, on a light workstation
            raise BadInput(
                f"{url} has no {MANIFEST}, and looking for the public recipe's layout needs {missing.name}: pip install it"
            ) from None

        found = recipe.open_folder(url)
        if found is None:
            raise BadInput(
                f"{url} is not a dataset: {error}. `tpu-train shards` makes one; if that was interrupted, run the same command again"
            ) from None
        return found
    return loads(data, url)


def check(url: str, *, kind: str, tokenizer: str | None, sequence_length: int | None = None) -> Dataset:
    """All that can be said of a dataset without reading its records: the manifest is whole, it is for this task, length
    and tokenizer (a folder; None: not looked at), and every shard is there with the right size. Raises BadInput,
    StorageError."""
    dataset = open_dataset(url)
    dataset.require(kind=kind, tokenizer_hash=tokenizer and _hash_of(tokenizer), sequence_length=sequence_length)
    find_shards(dataset)
    return dataset


def _hash_of(tokenizer: str) -> str:
    where = storage.join(tokenizer, "tokenizer.json")
    try:
        return tokenizer_hash(storage.read(where))
    except storage.NotFound as error:
        raise BadInput(
            f"{tokenizer} is not a tokenizer folder: {error}. Make one with `tpu-train tokenizer --out {tokenizer}`"
        ) from None
    except (ValueError, AttributeError) as error:
        raise BadInput(f"{where} is not a tokenizer of the `tokenizers` library: {error}") from None
