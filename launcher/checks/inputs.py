"""What is checked before anything is created: programs, buckets, datasets.

Each check raises BadInput that says what is missing and what to do, before a slice costs anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher import shell
from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from training.errors import TrainError
from training.storage import is_remote, split_remote

_SECONDS = 30.0


def tools() -> None:
    """Raises BadInput unless gcloud and ssh are installed."""
    shell.find("gcloud")
    shell.find("ssh")


def buckets(config: Config) -> None:
    """Raises BadInput unless every bucket that the trainer's sections name exists."""
    if config.trainer is None:
        return
    data = config.trainer.data
    urls = {("output",): config.trainer.output, ("data", "train"): data.train, ("data", "tokenizer"): data.tokenizer}
    if data.evaluation:
        urls["data", "evaluation"] = data.evaluation
    names: dict[str, tuple[str, ...]] = {}
    for key, url in urls.items():
        if is_remote(url):
            names.setdefault(split_remote(url)[0], key)
    for name, key in names.items():
        _bucket(config.project, name, f"{config.document.place(key)}: {'.'.join(key)}")


def data(config: Config) -> None:
    """Raises BadInput unless the datasets are complete and fit the configuration, down to the tokenizer that wrote them
    and the size of every shard.

    A tokenizer on the Hub is compared by the hosts, when they start: this machine has no client of the Hub.
    """
    if config.trainer is None:
        return
    from training.data.formats.open_dataset import check
    from training.storage.hub import is_on_hub

    tokenizer = config.trainer.data.tokenizer
    length: int | None = None
    for key, url in _datasets(config):
        try:
            length = check(
                url,
                kind=config.trainer.task,
                tokenizer=None if is_on_hub(tokenizer) else tokenizer,
                sequence_length=length,
            ).sequence_length
        except TrainError as error:
            raise BadInput(f"{config.document.place(key)}: {'.'.join(key)}: {error}") from None


def _datasets(config: Config) -> Iterable[tuple[tuple[str, str], str]]:
    assert config.trainer is not None
    yield ("data", "train"), config.trainer.data.train
    if config.trainer.data.evaluation:
        yield ("data", "evaluation"), config.trainer.data.evaluation


def _bucket(project: str, name: str, place: str) -> None:
    from google.api_core import exceptions
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.cloud import storage

    try:
        bucket = storage.Client(project=project).lookup_bucket(name, timeout=_SECONDS)
    except DefaultCredentialsError:
        raise BadInput(
            f"{place}: gs://{name} can't be looked at without credentials: gcloud auth application-default login"
        ) from None
    except exceptions.Forbidden as error:
        raise LaunchError(
            f"{place}: no permission to look at gs://{name}: {error.message}", exit_code=Exit.PERMISSION
        ) from None
    except (exceptions.GoogleAPICallError, GoogleAuthError, OSError) as error:
        raise LaunchError(f"{place}: Cloud Storage does not answer about gs://{name}: {error}") from None
    if bucket is None:
        raise BadInput(
            f"{place}: bucket gs://{name} does not exist: "
            f"create it with `gcloud storage buckets create gs://{name}`, or correct the name"
        )
