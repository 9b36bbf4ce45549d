"""The set-up and test scripts of tools/: what they say when something is missing, and that each test is run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]


def test_missing_gcloud_is_named_with_what_to_install(tmp_path: Path) -> None:
    for program in ("bash", "dirname", "id"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    said = subprocess.run(
        [HOUSE / "tools" / "need.sh", "gcloud"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30
    )
    assert said.returncode == 2
    assert "gcloud, the Google Cloud CLI (https://" in said.stderr


@pytest.mark.parametrize(
    ("environment", "code"),
    [({}, 0), ({"CI": "true"}, 1), ({"TPU_LAUNCH_NO_SKIPS": "1"}, 1), ({"TPU_LAUNCH_NO_SKIPS": "0"}, 0)],
)
def test_test_that_did_not_run_fails_the_run_in_ci(tmp_path: Path, environment: dict[str, str], code: int) -> None:
    shutil.copy(HOUSE / "tests" / "conftest.py", tmp_path)
    source = "import pytest\ndef test_runs(): pass\n@pytest.mark.xfail\ndef test_left_out(): assert False\n"
    (tmp_path / "test_it.py").write_text(source)
    clean = {key: value for key, value in os.environ.items() if key not in ("CI", "TPU_LAUNCH_NO_SKIPS")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    said = subprocess.run(command, cwd=tmp_path, env=clean | environment, capture_output=True, text=True, timeout=60)
    assert said.returncode == code
    assert ("test_it.py::test_left_out" in said.stdout) == bool(code)
