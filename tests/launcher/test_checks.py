"""Claims about `doctor`, and about looks at buckets and datasets before a creation: what counts as doubtful or broken.

Real files and a real ssh-keygen; no gcloud. The account's rights decide, and waits are bounded.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from google.auth.exceptions import RefreshError

from launcher.checks import doctor, inputs
from launcher.checks.doctor import check_buckets, check_quota
from launcher.config import Config, load
from launcher.emulator.bucket import StorageApiError
from launcher.emulator.http_server import HttpRequest, HttpResponse, json_response
from launcher.emulator.storage import error_response, refuse_buckets
from launcher.errors import BadInput, Exit, LaunchError
from launcher.gcloud import PermissionDenied, explain_error
from tests.kubernetes.golden import EXAMPLE
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.test_runs import Workstation
from tests.processes import ROOT
from tests.servers import BucketServer
from tests.training import test_labelled_rows as labelled
from training.storage import gcs


def test_the_sdk_that_was_tested_passes_an_older_one_is_doubtful_and_an_account_is_needed() -> None:
    found = [doctor.check_version({"basic": {"version": each}}).severity for each in ("528.0.0", "540.1.0", "473.0.0")]
    assert found == ["PASS", "PASS", "WARN"]
    assert doctor.check_account({"config": {"account": "ann@example.com"}}).severity == "PASS"
    assert doctor.check_account({"config": {"account": None}}).fix.startswith("gcloud auth login")


def test_docker_must_have_something_to_show_to_googles_registry() -> None:
    host = "us-central2-docker.pkg.dev"
    settings = ({"credHelpers": {host: "gcloud"}}, {"auths": {host: {"auth": "eA=="}}}, {"credsStore": "desktop"})
    assert [doctor.check_registry(host, each).severity for each in settings] == ["PASS", "PASS", "WARN"]
    missing = doctor.check_registry(host, {"credHelpers": {"eu.gcr.io": "gcloud"}})
    assert (missing.severity, missing.fix) == ("FAIL", f"gcloud auth configure-docker {host} --quiet")
    assert doctor.check_registry("localhost:5000", {}).severity == "WARN"


@pytest.mark.parametrize(
    ("image", "severity"),
    [
        (f"reference: eu.gcr.io/p/a@sha256:{64 * '1'}, repository: eu.gcr.io/p/a", "PASS"),
        ("build: engine", "WARN"),
        ("build: registry", "FAIL"),
        ("base: eu.gcr.io/p/a", "FAIL"),
    ],
)
def test_a_repository_is_needed_where_the_image_is_made_in_it(tmp_path: Path, image: str, severity: str) -> None:
    assert doctor._registry(load_text(tmp_path, f"{SLICE}image: {{{image}}}\n")).severity == severity


@pytest.mark.parametrize(
    ("passphrase", "mode", "verdict"), [("", 0o600, "PASS"), ("", 0o644, "FAIL"), ("secret", 0o600, "FAIL")]
)
def test_a_key_must_be_private_and_usable_without_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passphrase: str, mode: int, verdict: str
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "google_compute_engine"
    assert doctor._ssh_key(key).severity == "WARN"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(key)], check=True)
    key.chmod(mode)
    row = doctor._ssh_key(key)
    assert (row.severity, "can be read by others" in row.message) == (verdict, mode == 0o644)
    assert (verdict == "PASS") == (row.fix == "")


def test_an_api_that_is_off_is_told_with_the_command_that_turns_it_on() -> None:
    said = "PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before or it is disabled. Enable it by"
    error = explain_error(f"ERROR: (gcloud.compute.tpus.tpu-vm.list) {said} visiting https://x", ["gcloud"])
    assert isinstance(error, PermissionDenied)
    assert "gcloud services enable tpu.googleapis.com" in str(error)
    no_billing = explain_error("ERROR: PERMISSION_DENIED: Billing is disabled for project 1", ["gcloud"])
    assert "turn it on in the Cloud console" in doctor._fix_of(Mock(project="p"), no_billing)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("slice.accelerator_type=v2-8",), ["can't open", "SPMD", "requirements-2.8.txt"]),
        (("slice.accelerator_type=v3-8",), ["can't open", "requirements-2.8.txt"]),
        (("slice.accelerator_type=v3-8", "image.build_args={REQUIREMENTS: requirements-2.8.txt}"), []),
        (("slice.accelerator_type=v4-8",), []),
        (("slice.accelerator_type=v3-8", "backend=tensorflow"), []),
    ],
)
def test_reports_of_the_newest_libtpu_on_old_generations_are_told(changes: tuple[str, ...], words: list[str]) -> None:
    rows = doctor.old_generation_findings(load(EXAMPLE, ("train.global_batch_size=128", *changes)))
    assert [row.severity for row in rows] == ["WARN"] * bool(words)
    for word in words:
        assert word in rows[0].message + rows[0].fix


@pytest.mark.parametrize(
    ("changes", "severity"),
    [((), "PASS"), (("slice.candidates=[{accelerator_type: v4-16}]",), "FAIL"), (("slice.candidates=[]",), "FAIL")],
)
def test_one_candidate_within_the_cost_limits_is_enough(changes: tuple[str, ...], severity: str) -> None:
    candidates = "slice.candidates=[{accelerator_type: v4-16}, {accelerator_type: v4-8}]"
    given = ("slice.accelerator_type=v4-32", "zone=us-central2-b", "slice.max_cost_per_hour=15", candidates, *changes)
    assert doctor._cost(load(EXAMPLE, ("train.global_batch_size=128", *given))).severity == severity


def test_the_older_torch_xla_is_locked_with_the_libtpu_it_was_released_with() -> None:
    newest, older = (
        dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "images" / "torch-xla" / name).read_text(), re.MULTILINE))
        for name in ("requirements.txt", "requirements-2.8.txt")
    )
    assert (older["torch"], older["torch-xla"], older["libtpu"]) == ("2.8.0", "2.8.0", "0.0.17")
    own = [name for name in newest if not name.startswith(("torch", "nvidia", "jax", "libtpu", "triton"))]
    assert {name: older[name] for name in own} == {name: newest[name] for name in own}


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
    error = error_response(StorageApiError(403, "forbidden", "me@x does not have storage.buckets.get access"))
    return lambda request: error if re.fullmatch("|".join(paths), request.path) else None


@pytest.mark.parametrize(
    ("location", "warned"),
    [("US-CENTRAL2", ""), ("US", ""), ("NAM4", ""), ("US-EAST1", "us-central2 $0.02"),
     ("EUROPE-WEST4", "us-central2 $0.05"), ("ASIA-EAST1", "us-central2 $0.08"),
     ("SOUTHAMERICA-EAST1", "us-central2 $0.14")],
)  # fmt: skip
def test_a_bucket_elsewhere_costs_dollars(server: BucketServer, tmp_path: Path, location: str, warned: str) -> None:
    place = json_response({"name": "bucket", "location": location})
    server.fault = lambda request: place if request.path.endswith("/bucket") else None
    inputs.buckets(config(tmp_path), (said := list[str]()).append)
    assert [warned in line for line in said] == [True] * bool(warned)
    found = check_buckets(config(tmp_path))
    assert (found.severity == "WARN") == bool(warned)
    assert warned in found.message


def test_a_login_that_has_expired_is_told_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google.cloud.storage.Client", Mock(side_effect=RefreshError("it was revoked")))
    with pytest.raises(
        BadInput, match=r"without valid credentials \(it was revoked\): gcloud auth application-default"
    ):
        inputs.buckets(config(tmp_path), print)


LOOKING_AT_IT, LISTING_ITS_OBJECTS = r"/storage/v1/b/[^/]+", r"/storage/v1/b/[^/]+/o"


def test_a_role_without_buckets_get_is_enough_also_to_miss_a_bucket(server: BucketServer, tmp_path: Path) -> None:
    server.fault = refuse_buckets
    inputs.buckets(config(tmp_path), pytest.fail)
    with pytest.raises(BadInput, match=r"run\.yaml:7: output: bucket gs://none does not exist"):
        inputs.buckets(config(tmp_path, "none"), print)


def test_an_account_that_sees_nothing_of_a_bucket_is_warned_and_goes_on(server: BucketServer, tmp_path: Path) -> None:
    server.fault = refuse(LOOKING_AT_IT, LISTING_ITS_OBJECTS)
    inputs.buckets(config(tmp_path), (said := list[str]()).append)
    (line,) = said
    assert "run.yaml:7: output: it is unknown whether gs://bucket exists" in line
    assert "storage.buckets.get" in line
    assert check_buckets(config(tmp_path)).severity == "WARN"


@pytest.mark.parametrize("answer", ["503", "nothing listens"])
def test_a_service_that_does_not_answer_is_named_in_time(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(inputs, "_SECONDS", 2.0)
    quick = gcs.Timeouts(connect=2, silence=1, deadline=2, first_delay=0.01, longest_delay=0.1)
    monkeypatch.setattr(gcs, "timeouts", quick)
    server.fault = lambda _: error_response(StorageApiError(503, "backendError", "try again"))
    if answer == "nothing listens":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    begin = time.monotonic()
    for look, told in (
        (inputs.buckets, r"output: Cloud Storage does not answer about gs://bucket .*online\?"),
        (inputs.data, r"run\.yaml:5: data\.train: "),
    ):
        with pytest.raises(LaunchError, match=told) as bad:
            look(config(tmp_path), print)
        assert bad.value.exit_code is Exit.CLOUD_ERROR
    assert time.monotonic() - begin < 20


OBJECTS = r"/(storage|download/storage)/v1/b/[^/]+/o/.*"


def test_a_dataset_that_this_account_may_not_read_is_left_to_the_hosts(server: BucketServer, tmp_path: Path) -> None:
    server.fault = refuse(LOOKING_AT_IT, LISTING_ITS_OBJECTS, OBJECTS)
    inputs.data(config(tmp_path), (said := list[str]()).append)
    told = "run.yaml:5: data.train: the dataset is not checked now, only when the hosts read it: gs://bucket/data"
    assert [told in line for line in said] == [True]


def test_a_run_whose_dataset_is_not_there_starts_nothing(server: BucketServer, work: Workstation) -> None:
    with pytest.raises(BadInput, match=r"run\.yaml:5: data\.train: gs://bucket/data is not a dataset"):
        work.run(config(work.folder))
    assert not work.hosts.attempts


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


def test_data_that_does_not_fit_the_model_or_the_other_data_is_refused_too(tmp_path: Path) -> None:
    labelled.make(tmp_path / "data", 20)  # up to 32 tokens
    labelled.write(tmp_path / "other", labelled.rows(20), labelled.LabelKind(names=(*labelled.LABELS, "wild")))
    values = {"model_type": "roberta", "max_position_embeddings": 33, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    text = FILE.replace("gs://bucket/tokenizer", "org/name").replace("gs://bucket", str(tmp_path))
    text = text.replace("BUCKET", "bucket") + "task: classification\n"
    evaluation = f"{tmp_path}/other has 4 labels and {tmp_path}/data 3; label 3 is 'wild' in the one"
    for old, new, message in (
        ("name: bert-base", f"path: {tmp_path}", "4: model.path: the .* 32 tokens, but the model has only 31"),
        ("name: bert-base", "name: bert-tiny, max_positions: 16", "4: model: .* 32 tokens, but the model has only 16"),
        ('data"', f'data", evaluation: "{tmp_path}/other"', f"5: data.evaluation: {evaluation}"),
    ):
        with pytest.raises(BadInput, match=rf"run\.yaml:{message}"):
            inputs.data(load_text(tmp_path, text.replace(old, new)), print)


def test_the_quota_that_a_slice_needs_is_named(tmp_path: Path) -> None:
    row = check_quota(load_text(tmp_path, SLICE.replace("v4-16", "v4-16, capacity: spot")))
    assert row.severity == "WARN"
    assert "TPUV4... for the zone us-central2-b and the region us-central2" in row.message
    pattern = re.search(r"quotaId~(\S+)'", row.fix)
    # Names that users quote: marin #1612 and skypilot's failover handler have them of zones, regions and pods.
    for name in ("TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI", "TPUV4PreemptiblePerProjectPerZoneForTPUAPI"):
        assert re.search(pattern[1], name)
    assert not re.search(pattern[1], "TPUV4PerProjectPerZoneForTPUAPI"), "on demand"
