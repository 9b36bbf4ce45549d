"""Claims about which slices are ours and which are leftovers: entries as the API lists them."""

from __future__ import annotations

from typing import Any

from launcher.tpu_vm import inventory

NOW = 1_800_000_000.0


def node(**changes: Any) -> dict[str, Any]:
    return {
        "name": "projects/p/locations/us-central2-b/nodes/n",
        "state": "READY",
        "acceleratorType": "v4-8",
        "createTime": "2027-01-15T07:00:00Z",
        "labels": {"tpu-launch": "1", "tpu-launch-owner": "ann", "tpu-launch-run": "bert"},
        "schedulingConfig": {"spot": True},
        **changes,
    }


def queued(state: str) -> dict[str, Any]:
    spec = {"nodeId": "n", "node": {"acceleratorType": "v4-8", "labels": node()["labels"]}}
    return {
        "name": "projects/p/locations/us-central2-b/queuedResources/n",
        "state": {"state": state},
        "spot": {},
        "tpu": {"nodeSpec": [spec]},
        "createTime": "2027-01-15T07:00:00Z",
    }


def test_an_entry_says_whose_it_is_how_old_and_what_it_cost() -> None:
    found = inventory.parse_node(node())
    assert (found.name, found.zone, found.owner, found.run, found.capacity) == (
        "n",
        "us-central2-b",
        "ann",
        "bert",
        "spot",
    )
    shown = found.as_json(NOW)
    assert shown["age_seconds"] == 3600
    assert shown["cost"] == 3.69
    assert shown["leftover"] == ""


def test_leftovers_are_expired_or_dead_and_never_somebody_elses_unless_asked() -> None:
    labels = node()["labels"]
    fine = inventory.parse_node(node(labels={**labels, "tpu-launch-expires": str(int(NOW + 60))}))
    expired = inventory.parse_node(node(labels={**labels, "tpu-launch-expires": str(int(NOW - 60))}))
    dead = inventory.parse_node(node(state="PREEMPTED"))
    deleting = inventory.parse_node(node(state="DELETING", labels=expired.labels))
    other = inventory.parse_node(node(state="PREEMPTED", labels={**labels, "tpu-launch-owner": "bob"}))
    found = [fine, expired, dead, deleting, other]
    assert inventory.find_leftovers(found, NOW, owner="ann") == [expired, dead]
    assert inventory.find_leftovers(found, NOW, owner=None) == [expired, dead, other]
    assert expired.why_leftover(NOW) == "expired 1 min ago"


def test_a_dead_request_is_deleted_with_force_and_a_waiting_one_is_left_alone() -> None:
    waiting, suspended = (inventory.parse_queued(queued(state)) for state in ("WAITING_FOR_RESOURCES", "SUSPENDED"))
    assert waiting is not None
    assert suspended is not None
    assert inventory.find_leftovers([waiting, suspended], NOW, owner="ann") == [suspended]
    assert waiting.cost(NOW) == 0
    assert inventory.delete_command("p", suspended) == [
        *(
            "gcloud",
            "compute",
            "tpus",
            "queued-resources",
            "delete",
            "n",
            "--project=p",
            "--zone=us-central2-b",
            "--quiet",
            "--force",
        )
    ]


def test_a_node_from_the_queue_goes_with_its_request() -> None:
    found = inventory.parse_node(node(queuedResource="projects/p/locations/us-central2-b/queuedResources/q"))
    assert inventory.delete_command("p", found)[3:6] == ["queued-resources", "delete", "q"]
    assert inventory.delete_command("p", inventory.parse_node(node()))[3:6] == ["tpu-vm", "delete", "n"]


def test_a_request_for_several_slices_is_not_ours_to_count() -> None:
    assert (
        inventory.parse_queued({"name": "a/b/c/d/e/f", "tpu": {"nodeSpec": [{"multisliceParams": {"nodeCount": 2}}]}})
        is None
    )
