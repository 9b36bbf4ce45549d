"""Claims about `doctor`: what counts as fine, as doubtful, as broken. Real files and a real ssh-keygen; no gcloud."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.checks import doctor
from launcher.checks.doctor import Verdict
from launcher.gcloud.errors import PermissionDenied, explain_error


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
