"""Claims about looks at buckets and datasets before a creation: the account's rights decide; waits are bounded."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.checks import inputs
from launcher.checks.doctor import check_buckets
from launcher.config import Config
from launcher.emulator.bucket import StorageApiError
from launcher.emulator.http_server import HttpRequest, HttpResponse, json_response
from launcher.emulator.storage import error_response, refuse_buckets
from launcher.errors import BadInput, Exit, LaunchError
from tests.bucket_server import BucketServer
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.test_runs import Workstation
from tests.training import test_labelled_batches as labelled
from training.storage import gcs

FILE = f"""\
{SLICE}model: {{name: bert-base}}
data: {{train: "gs://bucket/data", tokenizer: "gs://bucket/tokenizer"}}
train: {{steps: 10, global_batch_size: 8}}
output: gs://BUCKET/out
"""


def config(folder: Path, bucket: str = "bucket") -> Config:
    return load_text(folder, FILE.replace("BUCKET", bucket))


def refuse(*paths: str) -> Callable[[HttpRequest], HttpResponse | None]:
    """A service that refuses what matches one of the paths."""

    def fault(request: HttpRequest) -> HttpResponse | None:
        if any(re.fullmatch(path, request.path) for path in paths):
            return error_response(StorageApiError(403, "forbidden", "me@x does not have storage.buckets.get access"))
        return None

    return fault


@pytest.mark.parametrize(
    ("location", "warned"),
    [("US-CENTRAL2", ""), ("US", ""), ("US-EAST1", "us-central2 $0.02"), ("EUROPE-WEST4", "us-central2 $0.05"),
     ("ASIA-EAST1", "us-central2 $0.08"), ("SOUTHAMERICA-EAST1", "us-central2 $0.14")],
)  # fmt: skip
def test_a_bucket_in_another_region_is_named_with_dollars(
    server: BucketServer, tmp_path: Path, location: str, warned: str
) -> None:
    def place(request: HttpRequest) -> HttpResponse | None:
        return json_response({"name": "bucket", "location": location}) if request.path.endswith("/bucket") else None

    server.fault = place
    said: list[str] = []
    inputs.buckets(config(tmp_path), said.append)
    assert [warned in line for line in said] == [True] * bool(warned)
    found = check_buckets(config(tmp_path))
    assert (found.severity == "WARN") == bool(warned)
    assert warned in found.message


LOOKING_AT_IT, LISTING_ITS_OBJECTS = r"/storage/v1/b/[^/]+", r"/storage/v1/b/[^/]+/o"


def test_a_role_without_buckets_get_is_enough(server: BucketServer, tmp_path: Path) -> None:
    server.fault = refuse_buckets
    said: list[str] = []
    inputs.buckets(config(tmp_path), said.append)
    assert said == []


def test_a_missing_bucket_is_named_with_that_role_too(server: BucketServer, tmp_path: Path) -> None:
    server.fault = refuse_buckets
    with pytest.raises(BadInput, match=r"run\.yaml:7: output: bucket gs://none does not exist"):
        inputs.buckets(config(tmp_path, "none"), print)


def test_an_account_that_sees_nothing_of_a_bucket_is_warned_and_goes_on(server: BucketServer, tmp_path: Path) -> None:
    server.fault = refuse(LOOKING_AT_IT, LISTING_ITS_OBJECTS)
    said: list[str] = []
    inputs.buckets(config(tmp_path), said.append)
    (line,) = said
    assert "run.yaml:7: output: it is unknown whether gs://bucket exists" in line
    assert "storage.buckets.get" in line
    assert check_buckets(config(tmp_path)).severity == "WARN"


@pytest.mark.parametrize("answer", ["503", "nothing listens"])
def test_a_service_that_does_not_answer_is_named_in_time(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(inputs, "_SECONDS", 2.0)
    server.fault = lambda _: error_response(StorageApiError(503, "backendError", "try again"))
    if answer == "nothing listens":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"output: Cloud Storage does not answer about gs://bucket .*online\?") as bad:
        inputs.buckets(config(tmp_path), print)
    assert bad.value.exit_code is Exit.CLOUD_ERROR
    assert time.monotonic() - begin < 10


OBJECTS = r"/(storage|download/storage)/v1/b/[^/]+/o/.*"


def test_a_dataset_that_this_account_may_not_read_is_left_to_the_hosts(server: BucketServer, tmp_path: Path) -> None:
    server.fault = refuse(LOOKING_AT_IT, LISTING_ITS_OBJECTS, OBJECTS)
    said: list[str] = []
    inputs.data(config(tmp_path), said.append)
    told = "run.yaml:5: data.train: the dataset is not checked now, only when the hosts read it: gs://bucket/data"
    assert [told in line for line in said] == [True]


def test_a_run_whose_dataset_is_not_there_starts_nothing(server: BucketServer, work: Workstation) -> None:
    with pytest.raises(BadInput, match=r"run\.yaml:5: data\.train: gs://bucket/data is not a dataset"):
        work.run(config(work.folder))
    assert not work.hosts.attempts


def test_a_bucket_that_can_not_be_read_now_is_no_bad_input(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = gcs.Timeouts(connect=2, silence=1, deadline=2, first_delay=0.01, longest_delay=0.1)
    monkeypatch.setattr(gcs, "timeouts", quick)
    server.fault = lambda _: error_response(StorageApiError(503, "backendError", "try again"))
    with pytest.raises(LaunchError, match=r"run\.yaml:5: data\.train: ") as bad:
        inputs.data(config(tmp_path), print)
    assert bad.value.exit_code is Exit.CLOUD_ERROR


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ('{"model_type": "gpt2"}', "task: classification",
         "is a gpt2 model whose config.json names no network in architectures"),
        ('{"model_type": "distilbert"}', "backend: tensorflow",
         "backend: tensorflow trains one of: bert, roberta; take"),
        ('{"model_type": "bert", "hidden_size": "many"}', "", "hidden_size must be a whole number above 0, not 'many'"),
        ("[]", "", "config.json is no model's: it has no model_type"),
        ("{", "", "config.json is not JSON"),
    ],
)  # fmt: skip
def test_a_model_that_the_run_can_not_train_is_refused_before_anything_is_rented(
    server: BucketServer, tmp_path: Path, model: str, more: str, message: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(model)
    text = FILE.replace("BUCKET", "bucket").replace("name: bert-base", f"path: {tmp_path}/model") + more
    with pytest.raises(BadInput, match=r"run\.yaml:4: model\.path: ") as caught:
        inputs.data(load_text(tmp_path, text), print)
    assert message in str(caught.value)
    assert not server.requests, "before the datasets are looked at"


def test_rows_longer_than_the_starting_model_s_positions_are_refused_too(tmp_path: Path) -> None:
    labelled.make(tmp_path / "data", 20)  # up to 32 tokens
    values = {"model_type": "roberta", "max_position_embeddings": 33, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    text = FILE.replace("gs://bucket/tokenizer", "org/name").replace("gs://bucket", str(tmp_path))
    text = text.replace("BUCKET", "bucket").replace("name: bert-base", f"path: {tmp_path}") + "task: classification\n"
    with pytest.raises(BadInput, match=r"run\.yaml:4: model\.path: the dataset's rows have 32 .* only 31 positions"):
        inputs.data(load_text(tmp_path, text), print)
