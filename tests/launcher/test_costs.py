"""Claims about prices: what the table says, what it does not know, and what a limit refuses."""

from pathlib import Path

import pytest

from launcher import costs
from launcher.config import Config
from launcher.errors import BadInput
from launcher.tpu_vm import ownership
from launcher.workstation import Owner
from tests.launcher.run_files import load_text
from training.accelerators import ACCELERATORS
from training.machine import parse_time


def config(folder: Path, **slice_: object) -> Config:
    keys = {"name": "s", "accelerator_type": "v4-16", **slice_}
    lines = "".join(f"  {key}: {value}\n" for key, value in keys.items())
    return load_text(folder, f"project: p\nzone: us-central2-b\nslice:\n{lines}")


def test_a_slice_costs_its_chips_times_the_price_of_its_region_and_capacity() -> None:
    assert costs.per_hour("v4-16", "us-central2-b", "on-demand") == pytest.approx(8 * 3.22)
    assert costs.per_hour("v4-16", "us-central2-b", "spot") == pytest.approx(8 * 0.9215)
    assert costs.per_hour("v3-8", "europe-west4-a", "on-demand") == pytest.approx(8.80)
    assert costs.per_hour("v3-32", "europe-west4-a", "on-demand") == pytest.approx(32.0)
    assert costs.per_hour("v5litepod-8", "us-west4-a", "on-demand") == pytest.approx(9.60)


def test_what_the_table_does_not_know_is_unknown(tmp_path: Path) -> None:
    assert costs.per_hour("v4-16", "europe-west4-a", "on-demand") is None
    assert costs.per_hour("v6e-4", "southamerica-west1-a", "spot") is None
    assert costs.so_far("tpu7x-8", "us-central1-c", "on-demand", 60) is None
    assert "unknown" in costs.line(config(tmp_path, accelerator_type="v5litepod-8"))


def test_spot_is_never_dearer_than_on_demand() -> None:
    for name, each in ACCELERATORS.items():
        for zone in each.zones():
            spot, full = costs.per_hour(name, zone, "spot"), costs.per_hour(name, zone, "on-demand")
            assert spot is None or (full is not None and 0 < spot < full), (name, zone)


def test_a_limit_refuses_what_is_dearer_or_unknown(tmp_path: Path) -> None:
    costs.check(config(tmp_path))
    costs.check(config(tmp_path, max_cost_per_hour=25.77))
    with pytest.raises(BadInput, match=r"25\.70 an hour, but cost: about \$25\.76"):
        costs.check(config(tmp_path, max_cost_per_hour=25.7))
    with pytest.raises(BadInput, match="unknown"):
        costs.check(config(tmp_path, max_cost_per_hour=1000, accelerator_type="v5litepod-8"))


def test_age_and_cost_are_counted_from_the_time_of_creation(tmp_path: Path) -> None:
    created = "2026-11-20T08:00:00.500000Z"
    begun = parse_time(created)
    assert begun == 1795161600.5
    assert (
        costs.since(config(tmp_path), created, begun + 5400)
        == "created 1 h 30 min ago, cost so far: about $38.64 (list prices of 2026-11)"
    )
    assert costs.since(config(tmp_path), "", begun) == ""
    assert [costs.duration(seconds) for seconds in (40, 90, 7500, 273600)] == ["40 s", "1 min", "2 h 5 min", "3 d 4 h"]


def test_an_expiry_is_a_label_in_unix_seconds(tmp_path: Path) -> None:
    assert "tpu-launch-expires" not in ownership.make_labels(config(tmp_path), Owner("ann"), 1000.0)
    labels = ownership.make_labels(config(tmp_path, expires_hours=1.5), Owner("ann"), 1000.0)
    assert labels["tpu-launch-expires"] == "6400"
