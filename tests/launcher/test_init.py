"""Claims about `init`: the file it writes is valid whatever is asked for, and nothing is ever overwritten."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.cli import init
from launcher.cli.init import Answers
from launcher.cli.init import init as command
from launcher.config import load
from launcher.errors import BadInput
from training.accelerators import ACCELERATORS


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
def test_no_answer_makes_another_key_or_a_broken_file(
    tmp_path_factory: pytest.TempPathFactory, project: str, bucket: str
) -> None:
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
