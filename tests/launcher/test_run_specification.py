"""Claims about a run's specification and its events as files: what is written is read back, and nothing else is."""

import json
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import load
from launcher.errors import BadInput
from launcher.provider import Overlay
from launcher.run import specification
from launcher.run.ledger import Ledger
from launcher.run.specification import SecretSource, Specification
from tests.launcher.run_files import SLICE, load_text
from training.machine import Clock

FILE = f"""\
{SLICE}model: {{name: bert-base}}
data: {{train: gs://b/train, tokenizer: gs://b/tokenizer}}
train: {{steps: 10, global_batch_size: 64, learning_rate: 1e-4}}
output: gs://b/runs
run: {{secrets: [HF_TOKEN], environment: {{A: "1e-4", B: "no"}}}}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Specification:
    (tmp_path / "some.env").write_text("FROM_FILE=x\nHF_TOKEN=y\n")
    config = load_text(tmp_path, FILE, ["train.steps=20", "run.preemption_retries=3"])
    overlay = Overlay("/opt", b"archive")
    specification.write_overlay(tmp_path, overlay)
    variables = specification.read_env_file(tmp_path / "some.env")
    return specification.describe(
        config, "demo-1", env_file=tmp_path / "some.env", variables=variables, overlay=overlay, preflight=["ab"]
    )


def test_what_is_written_is_read_back_and_means_the_same_configuration(tmp_path: Path, spec: Specification) -> None:
    specification.write(tmp_path, spec)
    again = specification.read(tmp_path)
    assert again == spec
    config = again.config()
    original = load(tmp_path / "run.yaml", ["train.steps=20", "run.preemption_retries=3"])
    for section in ("slice", "image", "run", "gke", "trainer"):
        assert getattr(config, section) == getattr(original, section)
    assert config.document.dump() == original.document.dump(), "hosts get the same file, byte for byte"
    assert config.folder == original.folder
    assert stat.S_IMODE((tmp_path / "specification.yaml").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text", ["", "format: 2\n", "format: 1\nrun: x\n", "not: [valid", "- a list\n", "format: 1\nsurprise: 1\n"]
)
def test_a_damaged_or_newer_specification_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / specification.FILE).write_text(text)
    with pytest.raises(BadInput, match=r"specification\.yaml can't be used"):
        specification.read(tmp_path)


def test_an_overlay_that_was_changed_or_removed_is_refused(tmp_path: Path, spec: Specification) -> None:
    assert specification.read_overlay(tmp_path, spec) == Overlay("/opt", b"archive")
    (archive,) = tmp_path.glob("overlay-*")
    archive.write_bytes(b"other")
    with pytest.raises(BadInput, match="was changed"):
        specification.read_overlay(tmp_path, spec)
    archive.unlink()
    with pytest.raises(BadInput, match="can't be read"):
        specification.read_overlay(tmp_path, spec)


def test_values_of_secrets_come_from_this_command_line_the_runs_env_file_and_the_environment(
    tmp_path: Path, spec: Specification
) -> None:
    assert spec.secrets == ["HF_TOKEN", "FROM_FILE"]
    environment = {"HF_TOKEN": "environment", "FROM_FILE": "environment", "OTHER": "x"}
    assert SecretSource(environment, {}).values(spec) == {"HF_TOKEN": "y", "FROM_FILE": "x"}
    assert SecretSource(environment, {"HF_TOKEN": "given"}).values(spec)["HF_TOKEN"] == "given"
    (tmp_path / "some.env").unlink()
    assert SecretSource(environment, {}).values(spec) == {"HF_TOKEN": "environment", "FROM_FILE": "environment"}
    assert SecretSource({"HF_TOKEN": "x"}, {}).missing(spec) == ["FROM_FILE"]


def test_a_resumed_run_keeps_the_secrets_that_its_command_line_does_not_repeat(spec: Specification) -> None:
    requested = spec.model_copy(update={"secrets": ["ADDED", "HF_TOKEN"]})
    assert specification.resume(spec, requested).secrets == ["ADDED", "HF_TOKEN", "FROM_FILE"]
    bare = spec.model_copy(update={"env_file": None, "overlay": None})
    for kept, now in (spec, bare), (bare, spec), (bare, bare):
        resumed = specification.resume(kept, now)
        assert (resumed.env_file, resumed.overlay) == (now.env_file or kept.env_file, now.overlay or kept.overlay)


@pytest.mark.parametrize(
    "line",
    [{"event": "from the future", "attempt": 3}, {"event": "started"}, {"event": "started", "attempt": 1, "x": 1}],
)
def test_an_event_of_another_version_is_refused_with_its_path(tmp_path: Path, line: dict[str, object]) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": "t", **line}) + "\n")
    with pytest.raises(BadInput, match=r"events\.jsonl: an event of another version"):
        Ledger(tmp_path, Clock()).events()


@given(st.dictionaries(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), st.text("ab $#='\"\\{}", max_size=8)))
def test_quoted_values_of_an_env_file_arrive_as_they_are(values: dict[str, str]) -> None:
    quoted = {name: value.replace("\\", "\\\\").replace("'", "\\'") for name, value in values.items()}
    lines = "".join(f"{name}='{value}'\n" for name, value in quoted.items())
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(lines)
        file.flush()
        assert specification.read_env_file(Path(file.name)) == values
