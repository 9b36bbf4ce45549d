"""Files and Cloud Storage objects behind one set of functions, and their errors.

Callers write `from training import storage` and `storage.read(url)`. `files` has the functions and their failure model,
`types` their types and errors, `gcs` the client of Cloud Storage, `hub` the folders that are named on the Hugging Face
Hub. This module implements the protocol `Storage`: code whose storage can be replaced takes one as an argument, with
this module as the default.
"""

from training.storage.files import (
    append,
    delete,
    download,
    listing,
    read,
    read_into,
    remove_partial_files,
    stat,
    transfer_seconds,
    upload,
    write,
)
from training.storage.types import (
    REMOTE,
    AlreadyExists,
    Changed,
    NotAllowed,
    NotFound,
    Stat,
    Storage,
    StorageError,
    crc32c,
    is_remote,
    join,
    name_of,
    split_remote,
)

__all__ = [
    "REMOTE",
    "AlreadyExists",
    "Changed",
    "NotAllowed",
    "NotFound",
    "Stat",
    "Storage",
    "StorageError",
    "append",
    "crc32c",
    "delete",
    "download",
    "is_remote",
    "join",
    "listing",
    "name_of",
    "read",
    "read_into",
    "remove_partial_files",
    "split_remote",
    "stat",
    "transfer_seconds",
    "upload",
    "write",
]
