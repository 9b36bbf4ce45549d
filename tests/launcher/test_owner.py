"""The owner in labels: the user, and the account in gcloud's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.owner import hash_account, this_owner

FILE = "[core]\naccount = Ann@example.com\nproject = 100%\n"


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "configurations").mkdir()
    (tmp_path / "configurations" / "config_default").write_text(FILE)
    (tmp_path / "configurations" / "config_work").write_text(FILE.replace("Ann", "bob"))
    return tmp_path


def test_the_account_is_that_of_gclouds_active_configuration(settings: Path) -> None:
    environment = {"CLOUDSDK_CONFIG": str(settings)}
    assert this_owner(environment).account == hash_account("ann@example.com")
    (settings / "active_config").write_text("work\n")
    assert this_owner(environment).account == hash_account("bob@example.com")
    named = {**environment, "CLOUDSDK_ACTIVE_CONFIG_NAME": "default"}
    assert this_owner(named).account == hash_account("ann@example.com")
    assert this_owner({**environment, "CLOUDSDK_CORE_ACCOUNT": "c@d"}).account == hash_account("c@d")


@pytest.mark.parametrize("text", ["", "[core]\n", "not an ini file", "\0"])
def test_settings_without_an_account_have_none(settings: Path, text: str) -> None:
    (settings / "configurations" / "config_default").write_text(text)
    assert this_owner({"CLOUDSDK_CONFIG": str(settings)}).account == ""
    assert this_owner({"CLOUDSDK_CONFIG": str(settings / "nowhere")}).account == ""


def test_labels_hold_what_google_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "Ann.Über@corp" + "x" * 80)
    user = this_owner({}).user
    assert user.startswith("ann--ber-corp")
    assert len(user) == 63
    assert len(hash_account("ann@example.com")) == 12
