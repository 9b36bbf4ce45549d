"""Claims about `doctor`: what counts as fine, as doubtful, as broken. Real files and a real ssh-keygen; no gcloud."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from launcher.checks import doctor
from launcher.checks.doctor import Verdict
from launcher.config import load
from launcher.gcloud.errors import PermissionDenied, explain_error
from tests.kubernetes.golden import EXAMPLE


def test_the_sdk_that_was_tested_passes_and_an_older_one_is_doubtful() -> None:
    def verdict(version: str) -> Verdict:
        return doctor.version_row({"basic": {"version": version}}).verdict

    assert (verdict("528.0.0"), verdict("540.1.0"), verdict("473.0.0")) == (Verdict.PASS, Verdict.PASS, Verdict.WARN)


def test_an_account_is_needed_unless_credentials_are_switched_off() -> None:
    assert doctor.account_row({"config": {"account": "ann@example.com"}}).verdict is Verdict.PASS
    assert doctor.account_row({"config": {"account": None}}).fix.startswith("gcloud auth login")
    assert (
        doctor.account_row({"config": {"properties": {"auth": {"disable_credentials": "true"}}}}).verdict
        is Verdict.PASS
    )


def test_docker_must_have_something_to_show_to_googles_registry() -> None:
    host = "us-central2-docker.pkg.dev"
    assert doctor.registry_row(host, {"credHelpers": {host: "gcloud"}}).verdict is Verdict.PASS
    assert doctor.registry_row(host, {"auths": {host: {"auth": "eA=="}}}).verdict is Verdict.PASS
    assert doctor.registry_row(host, {"credsStore": "desktop"}).verdict is Verdict.WARN
    missing = doctor.registry_row(host, {"credHelpers": {"eu.gcr.io": "gcloud"}})
    assert (missing.verdict, missing.fix) == (Verdict.FAIL, f"gcloud auth configure-docker {host} --quiet")
    assert doctor.registry_row("localhost:5000", {}).verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("passphrase", "mode", "verdict"),
    [("", 0o600, Verdict.PASS), ("", 0o644, Verdict.FAIL), ("secret", 0o600, Verdict.FAIL)],
)
def test_a_key_must_be_private_and_usable_without_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passphrase: str, mode: int, verdict: Verdict
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "google_compute_engine"
    assert doctor._ssh_key(key).verdict is Verdict.WARN
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(key)], check=True)
    key.chmod(mode)
    row = doctor._ssh_key(key)
    assert row.verdict is verdict
    assert (verdict is Verdict.PASS) == (row.fix == "")


def test_an_api_that_is_off_is_told_with_the_command_that_turns_it_on() -> None:
    said = (
        "ERROR: (gcloud.compute.tpus.tpu-vm.list) PERMISSION_DENIED: "
        "Cloud TPU API has not been used in project 1 before or it is disabled. "
        "Enable it by visiting https://console.developers.google.com/"
    )
    error = explain_error(said, ["gcloud"])
    assert isinstance(error, PermissionDenied)
    assert "gcloud services enable tpu.googleapis.com" in str(error)


def test_only_a_failed_row_fails() -> None:
    rows = [doctor.Row("a", Verdict.PASS, ""), doctor.Row("b", Verdict.WARN, "")]
    assert not doctor.failed(rows)
    assert doctor.failed([*rows, doctor.Row("c", Verdict.FAIL, "")])


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
    rows = doctor.old_generation_rows(load(EXAMPLE, ("train.global_batch_size=128", *changes)))
    assert [row.verdict for row in rows] == [Verdict.WARN] * bool(words)
    for word in words:
        assert word in rows[0].detail + rows[0].fix


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
