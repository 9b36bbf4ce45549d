"""Opens a dataset of either layout, and checks it without reading its records.

Imports no framework; only a folder in the public recipe's layout, which has no manifest, needs numpy to read a record.
"""

from training import storage
from training.data.formats.dataset import MANIFEST, Dataset, find_shards, load_manifest, tokenizer_hash
from training.errors import BadInput


def open_dataset(url: str) -> Dataset:
    """Opens the dataset in a folder by its dataset.json; without one, as the public recipe's layout
    (`recipe_layout.open_folder`), for which numpy must be installed. Looks at no shard that dataset.json lists. Raises
    BadInput when the folder holds no dataset, a damaged one, or numpy is missing; and StorageError."""
    try:
        data = storage.read(storage.join(url, MANIFEST))
    except storage.NotFound as error:
        try:
            from training.data.formats import recipe_layout
        except ModuleNotFoundError as missing:  # numpy is not on every workstation
            raise BadInput(
                f"{url} has no {MANIFEST}, and looking for the public recipe's layout needs {missing.name}: "
                "pip install it"
            ) from None
        dataset = recipe_layout.open_folder(url)
        if dataset is None:
            raise BadInput(
                f"{url} is not a dataset: {error}. `tpu-train shards` makes one; if that was interrupted, "
                "run the same command again"
            ) from None
        return dataset
    return load_manifest(data, url)


def check_dataset(url: str, *, rows: str, tokenizer: str | None, train: Dataset | None = None) -> Dataset:
    """Opens and returns a dataset, after checking what needs no records read: that it has records, all of the kind
    `rows`; unless they are None, that `tokenizer` (a local or gs:// folder) wrote its ids (or the dataset names none),
    and that it can evaluate models trained on `train`; and its shards, as `find_shards`. Raises BadInput,
    StorageError."""
    dataset = open_dataset(url)
    dataset.require(rows=rows, tokenizer_hash=tokenizer and _read_tokenizer_hash(tokenizer))
    if train is not None:
        dataset.require_like(train)
    find_shards(dataset)
    return dataset


def _read_tokenizer_hash(tokenizer: str) -> str:
    """Returns the hash of the tokenizer.json in a folder (not a name on the Hub). Raises BadInput if that file is
    missing or invalid, and StorageError."""
    url = storage.join(tokenizer, "tokenizer.json")
    try:
        return tokenizer_hash(storage.read(url))
    except storage.NotFound as error:
        raise BadInput(
            f"{tokenizer} is not a tokenizer folder: {error}. Make one with `tpu-train tokenizer --out {tokenizer}`"
        ) from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise BadInput(f"{url} is not a tokenizer of the `tokenizers` library: {error}") from None
