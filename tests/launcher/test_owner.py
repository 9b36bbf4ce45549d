"""The owner in labels: the user, and the account that gcloud uses."""

import os
from pathlib import Path

import pytest

from launcher.workstation import hash_account, this_owner
from tests.launcher.script_host import write_program


@pytest.mark.parametrize(
    ("answer", "account"),
    [
        ("echo Ann@example.com", "ann@example.com"),
        ("echo 1-compute@developer.gserviceaccount.com", "1-compute@developer.gserviceaccount.com"),  # of a VM
        ("echo '(unset)' >&2; echo", ""),
        ("echo broken; exit 1", ""),
    ],
)
def test_the_account_is_the_one_that_gcloud_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, account: str
) -> None:
    write_program(tmp_path / "bin", "gcloud", f'[ "$*" = "config get account --quiet" ] || exit 9\n{answer}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("CLOUDSDK_CORE_ACCOUNT")
    assert this_owner().account == hash_account(account)
    assert (hash_account(account) == "") == (account == "")
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", "c@d")
    assert this_owner().account == hash_account("C@d")


def test_without_gcloud_there_is_no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUDSDK_CORE_ACCOUNT")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert this_owner().account == ""


def test_labels_hold_what_google_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "Ann.Über@corp" + "x" * 80)
    user = this_owner().user
    assert user.startswith("ann--ber-corp")
    assert len(user) == 63
    assert len(hash_account("ann@example.com")) == 12
