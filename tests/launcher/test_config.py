"""Claims about a run's file and the command line: every mistake is named with its place and what to do, before anything
is created, and exit code 2; `init` writes a valid file whatever is asked for, over no other."""

import re
from collections.abc import Sequence
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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("  name: demo", "  nmae: demo"), "run.yaml:4: unknown key 'slice.nmae'; did you mean 'name'?"),
        (("zone: us-central2-b", "zone: 7"), "run.yaml:2: zone: should be a valid string, not 7"),
        (("v4-16", "v3-16"),
         "run.yaml:5: slice.accelerator_type: accelerator type 'v3-16' does not exist; v3 has v3-8"),
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
    with pytest.raises(BadInput) as caught:
        load_text(tmp_path, GOOD.replace(*change), command=["true"])
    assert expected in str(caught.value)
    assert caught.value.exit_code is Exit.BAD_INPUT


def test_a_file_that_runs_nothing_is_refused_by_run_only(tmp_path: Path) -> None:
    config = load_text(tmp_path, GOOD)  # enough for up and down
    with pytest.raises(BadInput, match=r"nothing to run: give run\.command"):
        config.require_something_to_run()


def test_all_mistakes_are_named_at_once_and_those_of_overrides_by_their_flag(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--set slice\.create_minutes") as caught:
        load_text(tmp_path, GOOD.replace("v4-16", "v9-1"), ["slice.create_minutes=soon"], command=["true"])
    assert len(str(caught.value).splitlines()) == 2


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
    told = r"image\.backend: this image is of tensorflow, and `backend` is torch-xla: remove image\.backend"
    with pytest.raises(BadInput, match=told):
        backend("image.backend=tensorflow")


def test_a_run_may_go_on_with_another_backend_or_mesh_and_with_no_other_difference(tmp_path: Path) -> None:
    changes: list[list[str]] = [[], ["backend=torch-tpu", "train.mesh.fsdp=2"], ["train.steps=2"]]
    first, same, other = (hash_configuration(load_text(tmp_path, GOOD + TRAINS, each)) for each in changes)
    assert first == same != other


SECRET_NAMES = (
    *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PRIVATE_KEY", "SSH_PRIVATE_KEY_BASE64", "WANDB_API_KEY"),
    *("AZURE_STORAGE_ACCOUNT_KEY", "PGPASSWORD", "MYSQL_PWD", "CLIENT_SECRET_JSON"),
)


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        *[(name, "x", True) for name in SECRET_NAMES],
        ("PIP_INDEX_URL", "https://me:s3cret@pypi.example/simple", True),
        ("SOURCE", "git+https://abcdefghijklmnopqrstuv@host/x", True),
        ("CERTIFICATE", "-----BEGIN PRIVATE KEY-----", True),
        ("AWS_ACCESS_KEY_ID", "x", False),
        ("SECRET_NAME", "x", False),
        ("TOKENIZERS_PARALLELISM", "true", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/key.json", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "{...}", True),
        ("AWS_SHARED_CREDENTIALS_FILE", "/etc/aws", False),
        ("PIP_INDEX_URL", "https://pypi.example/simple", False),
        ("REMOTE", "ssh://git@host:22/repository", False),
        ("PRIMARY_KEY", "id", False),
        ("PWD", "/app", False),
    ],
)
@pytest.mark.parametrize("place", ["run.environment", "image.build_args"])
def test_a_variable_like_a_secret_is_refused(tmp_path: Path, place: str, name: str, value: str, refused: bool) -> None:
    section, key = place.split(".")
    text = GOOD + f"{section}:\n  {key}:\n    {name}: '{value}'\n"
    if not refused:
        load_text(tmp_path, text, command=["true"])
        return
    with pytest.raises(BadInput) as caught:
        load_text(tmp_path, text, command=["true"])
    assert f"run.yaml:8: {place}: {name} looks like a secret" in str(caught.value)
    assert "s3cret" not in str(caught.value)


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
    ],
)
def test_a_value_that_would_fail_only_later_is_refused(tmp_path: Path, section: str, words: str) -> None:
    with pytest.raises(BadInput, match=r"run\.yaml:6: ") as caught:
        load_text(tmp_path, f"{GOOD}{section}\n", command=["true"])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        "image: {repository: us-central2-docker.pkg.dev/my-project/images/bert}",
        "image: {repository: 'localhost:5000/p/a_b.c-d'}",
        "image: {repository: me/image}",
        "run: {environment: {EMPTY: ''}, shm_size: 100m}",
        "slice: {name: demo, accelerator_type: v4-16, labels: {team: ''}}",
        "gke: {gcsfuse: {bucket: my-bucket, folder: /b, options: ''}, node_selector: {a: ''}}",
    ],
)
def test_a_value_that_is_meant_is_accepted(tmp_path: Path, section: str) -> None:
    text = GOOD if not section.startswith("slice") else GOOD[: GOOD.index("slice:")]
    load_text(tmp_path, f"{text}{section}\n", command=["true"])


TORCH_TPU = GOOD + "image: {backend: torch-tpu}\n"


@pytest.mark.parametrize(
    "command", [["tpu-train", "exec", "--runtime", "torch-tpu"], ["tpu-train", "exec", "--runtime=torch-tpu"]]
)
def test_torch_tpu_is_refused_on_a_slice_or_in_an_image_that_is_not_for_it(tmp_path: Path, command: list[str]) -> None:
    assert load_text(tmp_path, TORCH_TPU, command=command).backend == "torch-tpu"
    with pytest.raises(BadInput, match=r"run.yaml:5: slice.accelerator_type: TorchTPU does not know TPU v3 \(v3-32\)"):
        load_text(tmp_path, TORCH_TPU.replace("v4-16", "v3-32"), command=command)
    with pytest.raises(BadInput, match="TorchTPU does not know TPU v2"):
        load_text(tmp_path, TORCH_TPU.replace("v4-16", "v2-8"), command=["python", "train.py"])
    with pytest.raises(BadInput, match=r"--runtime torch-tpu needs image\.backend: torch-tpu"):
        load_text(tmp_path, GOOD, command=command)


def test_the_trainer_with_torch_tpu_selects_its_image_and_is_refused_on_v3() -> None:
    file, runtime = Path(__file__).parents[2] / "examples" / "rehearsal.yaml", "backend=torch-tpu"
    assert load(file, [runtime]).backend == "torch-tpu"
    with pytest.raises(BadInput, match=r"slice.accelerator_type: TorchTPU does not know TPU v3 \(v3-8\)"):
        load(file, [runtime, "slice.accelerator_type=v3-8"])
    with pytest.raises(BadInput, match=r"train.mesh.fsdp is 3, which does not divide 8 devices"):
        load(file, [runtime, "train.mesh.fsdp=3"])


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
    assert ended.returncode == 2, told
    assert "Traceback" not in told
    assert re.search(expected, told)


@pytest.mark.parametrize("name", ["v2-8", "v3-32", "v4-16", "v5litepod-8", "v5p-8", "v6e-256"])
@pytest.mark.parametrize("bucket", [None, "my-bucket"])
def test_the_file_is_valid_for_every_generation(tmp_path: Path, name: str, bucket: str | None) -> None:
    zone = ACCELERATORS[name].zones()[0]
    init.write(tmp_path / "run.yaml", Answers("my-project", name, zone, "bert", "spot", bucket))
    config = load(tmp_path / "run.yaml")
    assert (config.slice.accelerator_type, config.zone, config.slice.capacity) == (name, zone, "spot")
    assert (config.trainer is not None) == (bucket is not None)


def test_every_key_of_the_file_has_a_comment_or_stands_below_one(tmp_path: Path) -> None:
    text = init.text(Answers("p-1", "v4-8", "us-central2-b", "s", "on-demand"))
    for line in text.splitlines():
        assert not re.match(r"  ?\S+: \S", line) or "#" in line, line


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12))
def test_no_answer_breaks_the_file(tmp_path_factory: pytest.TempPathFactory, project: str, bucket: str) -> None:
    path = tmp_path_factory.mktemp("init") / "run.yaml"
    try:
        init.write(path, Answers(project, "v4-8", "us-central2-b", "s", "on-demand", bucket))
    except BadInput:
        assert not path.exists()
        return
    config = load(path)
    assert config.project == project
    assert config.trainer.output == f"gs://{bucket}/runs"


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine")
    with pytest.raises(BadInput, match="not overwritten"):
        init.write(path, Answers("p-1", "v4-8", "us-central2-b", "s", "on-demand"))
    assert path.read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]


def test_without_a_terminal_the_missing_flag_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["-f", str(tmp_path / "run.yaml")])
    assert isinstance(result.exception, BadInput)
    assert "--project" in str(result.exception)


def test_flags_alone_write_a_file(tmp_path: Path) -> None:
    flags = ["--project", "my-project", "--accelerator-type", "v4-16", "--bucket", "gs://data/"]
    result = CliRunner().invoke(command, ["-f", str(tmp_path / "run.yaml"), *flags])
    assert result.exit_code == 0, result.output
    config = load(tmp_path / "run.yaml")
    assert config.trainer.output == "gs://data/runs"
    assert config.trainer.train.global_batch_size % config.accelerator.devices == 0
