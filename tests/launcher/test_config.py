"""Claims about a run's file and the command line: every mistake is named with its place and what to do, before anything
is created, and exit code 2; `init` writes a valid file whatever is asked for, over no other."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.cli import init
from launcher.cli.init import Answers
from launcher.cli.init import init as command
from launcher.config import load
from launcher.errors import BadInput, Exit
from launcher.run.specification import hash_configuration
from tests.launcher.run_files import launch, load_text
from training.accelerators import ACCELERATORS

GOOD = """\
project: my-project
zone: us-central2-b
slice:
  name: demo
  accelerator_type: v4-16
"""


def refused(folder: Path, text: str, overrides: Sequence[str] = (), command: Sequence[str] = ("true",)) -> str:
    """Returns what is said about a file, which must be refused."""
    with pytest.raises(BadInput) as caught:
        load_text(folder, text, overrides, command)
    assert caught.value.exit_code is Exit.BAD_INPUT
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("  name: demo", "  nmae: demo"), "run.yaml:4: unknown key 'slice.nmae'; did you mean 'name'?"),
        (("zone: us-central2-b", "zone: 7"), "run.yaml:2: zone: should be a valid string, not 7"),
        (("v4-16", "v3-16"),
         "run.yaml:5: slice.accelerator_type: accelerator type 'v3-16' does not exist; v3 has v3-8"),
        (("v4-16", "v5e"), "'v5e': Cloud TPU calls v5e slices v5litepod-N; did you mean v5litepod-N?"),
        (("name: demo", "name: Demo_1"), "run.yaml:4: slice.name: 'Demo_1' must be a lower-case letter"),
        (("project: my-project\n", ""), "missing key 'project'"),
        (("v4-16", "v4-16\n  labels: {tpu-launch-owner: bob}"),
         "run.yaml:6: slice.labels: label tpu-launch-owner: tpu"),
        (("v4-16", "v4-16\n  expires_hours: 1e300"), "run.yaml:6: slice.expires_hours: should be less than"),
        (("v4-16", "v4-16\n  create_minutes: 1e12"), "run.yaml:6: slice.create_minutes: should be less than"),
        (("v4-16", "v4-16\n  capacity: flex-start"), "run.yaml:6: slice.capacity: flex-start needs slice.queued and"),
        (("slice:", "slcie:"), "run.yaml:3: unknown key 'slcie'; did you mean 'slice'?"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    assert expected in refused(tmp_path, GOOD.replace(*change))


def test_a_file_that_runs_nothing_is_refused_by_run_only(tmp_path: Path) -> None:
    config = load_text(tmp_path, GOOD)  # enough for up and down
    with pytest.raises(BadInput, match=r"nothing to run: give run\.command"):
        config.require_something_to_run()


def test_all_mistakes_are_named_at_once_and_those_of_overrides_by_their_flag(tmp_path: Path) -> None:
    _, second = refused(tmp_path, GOOD.replace("v4-16", "v9-1"), ["slice.create_minutes=soon"]).splitlines()
    assert "--set slice.create_minutes" in second


TRAINS = """\
model: {name: bert-tiny}
data: {train: d, tokenizer: t}
train: {steps: 1, global_batch_size: 8}
output: o
"""


def test_the_image_is_that_of_the_trainers_backend(tmp_path: Path) -> None:
    def backend(*overrides: str, command: Sequence[str] = ()) -> str:
        return load_text(tmp_path, GOOD + TRAINS, overrides, command).backend

    assert (backend(), backend("backend=tensorflow")) == ("torch-xla", "tensorflow")
    for key in ("backend", "image.backend"):
        assert backend(f"{key}=tensorflow", command=["true"]) == "tensorflow"
    told = "image.backend: this image is of tensorflow, and `backend` is torch-xla: remove image.backend"
    assert told in refused(tmp_path, GOOD + TRAINS, ["image.backend=tensorflow"], ())


def test_a_run_may_go_on_with_another_backend_or_mesh_and_with_no_other_difference(tmp_path: Path) -> None:
    changes: list[list[str]] = [[], ["backend=torch-tpu", "train.mesh.fsdp=2"], ["train.steps=2"]]
    first, same, other = (hash_configuration(load_text(tmp_path, GOOD + TRAINS, each)) for each in changes)
    assert first == same != other


SECRET = [
    *((name, "x") for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PRIVATE_KEY", "SSH_PRIVATE_KEY_BASE64")),
    *((name, "x") for name in ("WANDB_API_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "PGPASSWORD", "MYSQL_PWD")),
    ("CLIENT_SECRET_JSON", "x"), ("PIP_INDEX_URL", "https://me:s3cret@pypi.example/simple"),
    ("SOURCE", "git+https://abcdefghijklmnopqrstuv@host/x"), ("CERTIFICATE", "-----BEGIN PRIVATE KEY-----"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "{...}"),
]  # fmt: skip
PUBLIC = {
    "AWS_ACCESS_KEY_ID": "x", "SECRET_NAME": "x", "TOKENIZERS_PARALLELISM": "true", "PRIMARY_KEY": "id", "PWD": "/app",
    "GOOGLE_APPLICATION_CREDENTIALS": "/etc/key.json", "AWS_SHARED_CREDENTIALS_FILE": "/etc/aws",
    "PIP_INDEX_URL": "https://pypi.example/simple", "REMOTE": "ssh://git@host:22/repository",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SECRET)
@pytest.mark.parametrize("place", ["run.environment", "image.build_args"])
def test_a_variable_like_a_secret_is_refused(tmp_path: Path, place: str, name: str, value: str) -> None:
    section, key = place.split(".")
    variables = {other: text for other, text in PUBLIC.items() if other != name} | {name: value}
    lines = "".join(f"    {each}: {json.dumps(text)}\n" for each, text in variables.items())
    told = refused(tmp_path, f"{GOOD}{section}:\n  {key}:\n{lines}")
    assert f"run.yaml:{7 + len(variables)}: {place}: {name} looks like a secret" in told
    assert "s3cret" not in told


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("image: {repository: ''}", "image.repository: '' is empty"),
        ("image: {repository: 'https://r.example/p/i'}", "without https://, tag or digest"),
        ("image: {repository: 'r.example/p/i:latest'}", "without https://, tag or digest"),
        ("image: {repository: 'r.example/p/Image'}", "lower-case letters"),
        ("image: {code: ' '}", "image.code: ' ' is empty"),
        ("run: {user: ''}", "run.user: '' is empty"),
        ("run: {shm_size: 0g}", "run.shm_size: '0g' must be more than 0"),
        ('run: {environment: {A: "x\\ny"}}', "may not contain a line break"),
        ("gke: {gcsfuse: {bucket: 'gs://b', folder: /b}}", "gke.gcsfuse.bucket: 'gs://b' must be a bucket's name"),
        ("image: {repository: us-central2-docker.pkg.dev/my-project/images/bert}", ""),
        ("image: {repository: 'localhost:5000/p/a_b.c-d'}", ""),
        ("image: {repository: me/image}", ""),
        ("run: {environment: {EMPTY: ''}, shm_size: 100m, start_minutes: 0.5}", ""),
        ("  labels: {team: ''}\n  expires_hours: 0.5", ""),
        ("gke: {gcsfuse: {bucket: my-bucket, folder: /b, options: ''}, node_selector: {a: ''}}", ""),
    ],
)
def test_a_value_that_would_fail_only_later_is_refused_and_no_other(tmp_path: Path, section: str, words: str) -> None:
    text = f"{GOOD}{section}\n"
    if not words:
        load_text(tmp_path, text, command=["true"])
    else:
        told = refused(tmp_path, text)
        assert ("run.yaml:6: " in told, words in told) == (True, True), told


@pytest.mark.parametrize(
    "command", [["tpu-train", "exec", "--runtime", "torch-tpu"], ["tpu-train", "exec", "--runtime=torch-tpu"]]
)
def test_torch_tpu_is_refused_on_a_slice_or_in_an_image_that_is_not_for_it(tmp_path: Path, command: list[str]) -> None:
    text, unknown = (
        GOOD + "image: {backend: torch-tpu}\n",
        "run.yaml:5: slice.accelerator_type: TorchTPU does not know TPU",
    )
    assert load_text(tmp_path, text, command=command).backend == "torch-tpu"
    assert f"{unknown} v3 (v3-32)" in refused(tmp_path, text.replace("v4-16", "v3-32"), (), command)
    assert f"{unknown} v2" in refused(tmp_path, text.replace("v4-16", "v2-8"))
    assert "--runtime torch-tpu needs image.backend: torch-tpu" in refused(tmp_path, GOOD, (), command)


def test_the_trainer_with_torch_tpu_selects_its_image_and_is_refused_on_v3(tmp_path: Path) -> None:
    file, runtime = GOOD.replace("v4-16", "v6e-8") + TRAINS, "backend=torch-tpu"
    assert load_text(tmp_path, file, [runtime]).backend == "torch-tpu"
    for change, told in (
        ("slice.accelerator_type=v3-8", "slice.accelerator_type: TorchTPU does not know TPU v3 (v3-8)"),
        ("train.mesh.fsdp=3", "train.mesh.fsdp is 3, which does not divide 8 devices"),
    ):
        assert told in refused(tmp_path, file, [runtime, change], ())


UNKNOWN_KEY = r"run\.yaml:5: unknown key 'slice\.acelerator_type'; did you mean 'accelerator_type'\?"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        *((f"{verb} -f wrong/run.yaml", UNKNOWN_KEY) for verb in ("up", "run", "status", "stop", "down", "plan")),
        ("up -f nowhere.yaml", "nowhere.yaml: no such file"),
        ("up", r"(?s)tpu-launch\.yaml: no such file.*tpu-launch init"),
        ("up -f run.yaml --colour", "--colour"),
        ("up -f run.yaml --max-cost nan", "nan is not an amount of dollars"),
        ("up -f run.yaml --max-cost inf", "inf is not an amount of dollars"),
        ("logs run.yaml", "no run was started from this folder yet"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_message(tmp_path: Path, command: str, expected: str) -> None:
    (tmp_path / "wrong").mkdir()
    text = f"{GOOD}run: {{command: [echo, hello]}}\n"
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "wrong" / "run.yaml").write_text(text.replace("accelerator_type", "acelerator_type"))
    ended = launch(tmp_path, *command.split())
    told = ended.stdout + ended.stderr
    assert (ended.returncode, "Traceback" in told) == (2, False), told
    assert re.search(expected, told)


@pytest.mark.parametrize("name", ["v2-8", "v3-32", "v4-16", "v5litepod-8", "v5p-8", "v6e-256"])
@pytest.mark.parametrize("bucket", [None, "my-bucket"])
def test_the_file_is_valid_for_every_generation(tmp_path: Path, name: str, bucket: str | None) -> None:
    zone = ACCELERATORS[name].zones()[0]
    init.write(tmp_path / "run.yaml", Answers("my-project", name, zone, "bert", "spot", bucket))
    config = load(tmp_path / "run.yaml")
    assert (config.slice.accelerator_type, config.zone, config.slice.capacity) == (name, zone, "spot")
    assert (config.trainer is not None) == (bucket is not None)


MINE = Answers("p-1", "v4-8", "us-central2-b", "s", "on-demand")


def test_every_key_of_the_file_has_a_comment_or_stands_below_one() -> None:
    for line in init.text(MINE).splitlines():
        assert not re.match(r"  ?\S+: \S", line) or "#" in line, line


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12))
def test_no_answer_breaks_the_file(tmp_path_factory: pytest.TempPathFactory, project: str, bucket: str) -> None:
    path = tmp_path_factory.mktemp("init") / "run.yaml"
    try:
        init.write(path, replace(MINE, project=project, bucket=bucket))
    except BadInput:
        assert not path.exists()
        return
    config = load(path)
    assert (config.project, config.trainer.output) == (project, f"gs://{bucket}/runs")


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine")
    for wrong, why in ((path, "not overwr"), (path / "x", "can't be wr"), (tmp_path / ("x" * 256), "can't be wr")):
        with pytest.raises(BadInput, match=why):
            init.write(wrong, MINE)
    assert {file: file.read_text() for file in tmp_path.iterdir()} == {path: "mine"}


def test_flags_alone_write_a_file_and_a_missing_one_is_named_without_a_terminal(tmp_path: Path) -> None:
    file = ["-f", str(tmp_path / "run.yaml")]
    assert "--project" in str(CliRunner().invoke(command, file).exception)
    flags = ["--project", "my-project", "--accelerator-type", "v4-16", "--bucket", "gs://data/"]
    CliRunner().invoke(command, [*file, *flags], catch_exceptions=False)
    config = load(tmp_path / "run.yaml")
    assert config.trainer.output == "gs://data/runs"
    assert config.command == ("tpu-train", "train", "/etc/tpu-launch/config.yaml")
    assert config.trainer.train.global_batch_size % config.accelerator.devices == 0
