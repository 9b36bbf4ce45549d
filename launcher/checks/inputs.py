"""Checks before anything is created: buckets, datasets.

Each check raises BadInput that says what is missing and what to do, before a slice costs anything.
"""

from collections.abc import Callable
from typing import Any

from launcher import costs
from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from training.config import TrainerConfig
from training.errors import BadInput as BadDataset
from training.errors import TrainError
from training.storage import Changed, NotAllowed, NotFound, is_remote, split_remote

_SECONDS = 30.0  # for one bucket, with all retries
_REQUEST_SECONDS = 10.0


def buckets(config: Config, say: Callable[[str], None], warn: Callable[[str], None] | None = None) -> None:
    """Requires that the buckets of `output` and of the datasets and tokenizer in `data` exist. `say` is given a line
    for one that this account may neither read nor list, because the hosts' account may; `warn`, or `say`, one for a
    bucket whose data costs dollars on the way to a candidate's region. Does nothing without trainer's sections. Raises
    BadInput for a missing bucket or invalid credentials, LaunchError if Cloud Storage does not answer in 30 s."""
    if config.trainer is None:
        return
    data = config.trainer.data
    urls = {"output": config.trainer.output, "data.train": data.train, "data.tokenizer": data.tokenizer}
    urls |= {"data.evaluation": data.evaluation} if data.evaluation else {}
    names: dict[str, str] = {}
    for key, url in urls.items():
        if is_remote(url):
            names.setdefault(split_remote(url)[0], key)
    regions = dict.fromkeys(candidate.zone.rpartition("-")[0] for candidate in config.all_candidates)
    for name, key in names.items():
        place = config.document.locate(key)
        location = _require_bucket(config.project, name, place, say)
        dollars = {region: costs.transfer_per_gb(location, region) for region in regions}
        if far := [f"{region} ${price:.2f}" for region, price in dollars.items() if price]:
            (warn or say)(
                f"{place}: gs://{name} is in {location}: each GB that hosts read from it costs about (by region of the "
                f"slice) {', '.join(far)}; a bucket in the slice's region costs nothing"
            )


def data(config: Config, say: Callable[[str], None]) -> None:
    """Checks that the datasets are complete, with the size of every shard, and fit the configuration and tokenizer
    (unless it is on the Hub, or the dataset names none) and each other, and that the run can train the model on rows
    so long. `say` is given a line for a dataset that this account may not read, because the hosts' account may. Does
    nothing without trainer's sections. Raises BadInput for a missing, incomplete or unfit dataset, LaunchError for a
    silent bucket."""
    if config.trainer is None:
        return
    from training.data.formats.open_dataset import check_dataset
    from training.models.hugging_face import require_positions
    from training.registry import TASKS
    from training.storage.hub import is_on_hub

    network = _starting_model(config, config.trainer)
    section = config.trainer.data
    tokenizer = None if is_on_hub(section.tokenizer) else section.tokenizer
    rows, found = TASKS[config.trainer.task].rows, None
    for name, url in (("train", section.train), ("evaluation", section.evaluation)):
        if not url:
            continue
        place = config.document.locate(f"data.{name}")
        try:
            found = check_dataset(url, rows=rows, tokenizer=tokenizer, train=found)
        except NotAllowed as error:
            say(f"{place}: the dataset is not checked now, only when the hosts read it: {error}")
        except (BadDataset, NotFound, Changed) as error:
            raise BadInput(f"{place}: {error}") from None
        except TrainError as error:
            raise (LaunchError if is_remote(url) else BadInput)(f"{place}: {error}") from None
    positions = network.get("max_position_embeddings", network.get("n_positions"))
    if found and type(positions) is int:
        length, key = found.sequence_length, "model.path" if config.trainer.model.path else "model"
        try:
            require_positions(network["model_type"], positions, network.get("pad_token_id") or 0, length)
        except BadDataset as error:
            raise BadInput(f"{config.document.locate(key)}: {error}") from None


def _starting_model(config: Config, trainer: TrainerConfig) -> dict[str, Any]:
    """Returns the values in config.json of `model.path`, or how many positions a named model has; {} where only the
    hosts check the model: names on the Hub, runs' folders, folders that this machine can't read, and `model.config`.
    Raises BadInput for a family that the run can't train."""
    from training.models.hugging_face import read_config, require_family
    from training.registry import TASKS
    from training.storage import StorageError, join, stat
    from training.storage.hub import is_on_hub

    path = trainer.model.path
    if trainer.model.name is not None:
        return {"model_type": "bert", "max_position_embeddings": trainer.model.shape[-1]}
    if path is None or is_on_hub(path):
        return {}
    try:
        values = read_config(path) if stat(join(path, "config.json")) is not None else {}
        if values:
            require_family(values, path, TASKS[trainer.task].head, trainer.backend)
        return values
    except StorageError:
        return {}
    except BadDataset as error:
        reason = str(error).removeprefix("model.path ")
        raise BadInput(f"{config.document.locate('model.path')}: {reason}") from None


def _require_bucket(project: str, name: str, place: str, say: Callable[[str], None]) -> str:
    """Returns a bucket's location, in lower case; "" if the account may only list its objects, as a Storage Object
    User, or, after a line to `say`, may do neither. Raises BadInput if the bucket does not exist or credentials are
    invalid, LaunchError if Cloud Storage gives no answer in 30 s a request. `place` begins the messages: where the file
    names it."""
    from google.api_core import exceptions
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, RefreshError
    from google.cloud import storage
    from google.cloud.storage.retry import DEFAULT_RETRY

    limits: dict[str, Any] = {"timeout": _REQUEST_SECONDS, "retry": DEFAULT_RETRY.with_timeout(_SECONDS)}
    try:
        client = storage.Client(project=project)
        try:
            return str(client.get_bucket(name, **limits).location or "").lower()
        except exceptions.Forbidden:
            next(iter(client.list_blobs(name, max_results=1, fields="items(name)", **limits)), None)
            return ""
    except exceptions.NotFound:
        raise BadInput(
            f"{place}: bucket gs://{name} does not exist: "
            f"create it with `gcloud storage buckets create gs://{name}`, or correct the name"
        ) from None
    except (DefaultCredentialsError, RefreshError) as error:
        raise BadInput(
            f"{place}: gs://{name} can't be checked without valid credentials ({error}): "
            "gcloud auth application-default login"
        ) from None
    except exceptions.Forbidden as error:
        say(
            f"{place}: it is unknown whether gs://{name} exists: this account may neither read it nor list its objects "
            f"({error.message}); the hosts' account must"
        )
        return ""
    except (exceptions.GoogleAPIError, GoogleAuthError, OSError) as error:
        cause = error.cause if isinstance(error, exceptions.RetryError) else error
        raise LaunchError(
            f"{place}: Cloud Storage does not answer about gs://{name} within {_SECONDS:.0f} s ({cause}): "
            "is this machine online?"
        ) from None
