"""Claims about `doctor`: what counts as fine, as doubtful, as broken. Real files and a real ssh-keygen; no gcloud."""

import re
import subprocess
from pathlib import Path

import pytest

from launcher.checks import doctor
from launcher.config import load
from launcher.gcloud.errors import PermissionDenied, explain_error
from tests.kubernetes.golden import EXAMPLE


def test_the_sdk_that_was_tested_passes_and_an_older_one_is_doubtful() -> None:
    def verdict(version: str) -> str:
        return doctor.check_version({"basic": {"version": version}}).severity

    assert (verdict("528.0.0"), verdict("540.1.0"), verdict("473.0.0")) == ("PASS", "PASS", "WARN")


def test_an_account_is_needed() -> None:
    assert doctor.check_account({"config": {"account": "ann@example.com"}}).severity == "PASS"
    assert doctor.check_account({"config": {"account": None}}).fix.startswith("gcloud auth login")


def test_docker_must_have_something_to_show_to_googles_registry() -> None:
    host = "us-central2-docker.pkg.dev"
    assert doctor.check_registry(host, {"credHelpers": {host: "gcloud"}}).severity == "PASS"
    assert doctor.check_registry(host, {"auths": {host: {"auth": "eA=="}}}).severity == "PASS"
    assert doctor.check_registry(host, {"credsStore": "desktop"}).severity == "WARN"
    missing = doctor.check_registry(host, {"credHelpers": {"eu.gcr.io": "gcloud"}})
    assert (missing.severity, missing.fix) == ("FAIL", f"gcloud auth configure-docker {host} --quiet")
    assert doctor.check_registry("localhost:5000", {}).severity == "WARN"


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
    assert row.severity is verdict
    assert (verdict == "PASS") == (row.fix == "")


def test_an_api_that_is_off_is_told_with_the_command_that_turns_it_on() -> None:
    said = (
        "ERROR: (gcloud.compute.tpus.tpu-vm.list) PERMISSION_DENIED: "
        "Cloud TPU API has not been used in project 1 before or it is disabled. "
        "Enable it by visiting https://console.developers.google.com/"
    )
    error = explain_error(said, ["gcloud"])
    assert isinstance(error, PermissionDenied)
    assert "gcloud services enable tpu.googleapis.com" in str(error)


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


def test_the_older_torch_xla_is_locked_with_the_libtpu_it_was_released_with() -> None:
    folder = Path(__file__).resolve().parents[2] / "images" / "torch-xla"
    locks = {
        name: dict(re.findall(r"^([\w-]+)==(\S+)", (folder / f"{name}.txt").read_text(), re.MULTILINE))
        for name in ("requirements", "requirements-2.8")
    }
    newest, older = locks["requirements"], locks["requirements-2.8"]
    assert (older["torch"], older["torch-xla"], older["libtpu"]) == ("2.8.0", "2.8.0", "0.0.17")
    own = [name for name in newest if not name.startswith(("torch", "nvidia", "jax", "libtpu", "triton"))]
    assert {name: older[name] for name in own} == {name: newest[name] for name in own}
