"""Claims about which slices are ours and which are leftovers: the owner in labels, and entries as the API has them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launcher.cli import slices as commands
from launcher.emulator.state import QueuedResource
from launcher.errors import Exit
from launcher.tpu_vm import inventory
from launcher.workstation import Owner, hash_account, this_owner
from tests.launcher.emulated_gcloud import ANN, BUSY, UNAVAILABLE, Cloud
from tests.launcher.run_files import SLICE
from tests.launcher.script_host import write_program

NOW, CREATED = 1_800_000_000.0, "2027-01-15T07:00:00Z"
PARENT = "projects/p/locations/us-central2-b"
OURS = {"tpu-launch": "1", "tpu-launch-owner": "ann", "tpu-launch-account": ANN.account, "tpu-launch-run": "bert"}
EXPIRED = {**OURS, "tpu-launch-expires": "1"}


def node(**changes: Any) -> dict[str, Any]:
    kind = {"acceleratorType": "v4-8", "schedulingConfig": {"spot": True}, "labels": OURS}
    return {"name": f"{PARENT}/nodes/n", "state": "READY", "createTime": CREATED, **kind, **changes}


def queued(state: str) -> dict[str, Any]:
    kind = {"spot": {}, "tpu": {"nodeSpec": [{"nodeId": "n", "node": {"acceleratorType": "v4-8", "labels": OURS}}]}}
    return {"name": f"{PARENT}/queuedResources/n", "state": {"state": state}, "createTime": CREATED, **kind}


def test_an_entry_says_whose_it_is_how_old_and_what_it_cost() -> None:
    found = inventory.parse_node(node())
    assert found.owner == "ann"
    for key, capacity in ("preemptible", "spot"), ("reserved", "reserved"), ("other", "on-demand"):
        assert inventory.parse_node(node(schedulingConfig={key: True})).capacity == capacity
    assert [found.as_json(NOW)[key] for key in ("age_seconds", "cost", "leftover")] == [3600, 3.69, ""]
    assert dict(zip(inventory.COLUMNS, found.row(NOW), strict=True)) == {
        "slice": "n", "zone": "us-central2-b", "state": "READY", "type": "v4-8 spot", "owner": "ann", "run": "bert",
        "age": "1 h 0 min", "cost": "$3.69", "expires": "never",
    }  # fmt: skip
    assert inventory.parse_node(node(createTime="")).row(NOW)[6:8] == ["", "unknown"]


def test_leftovers_are_expired_or_dead_and_ours_unless_all_owners_are_meant() -> None:
    def owned(state: str = "READY", **labels: str) -> inventory.OwnedSlice:
        changed = {f"tpu-launch-{key}": value for key, value in labels.items()}
        return inventory.parse_node(node(state=state, labels={**OURS, **changed}))

    fine, expired = (owned(expires=str(int(NOW + seconds))) for seconds in (60, -60))
    dead, other, namesake = (owned("PREEMPTED", **each) for each in ({}, {"owner": "bob"}, {"account": "b" * 12}))
    found = [fine, expired, dead, owned("DELETING", expires="1"), other, namesake]
    assert inventory.find_leftovers(found, NOW, owner=ANN) == [expired, dead]
    assert inventory.find_leftovers(found, NOW, owner=None) == [expired, dead, other, namesake]
    assert expired.why_leftover(NOW) == "expired 1 min ago"
    assert [each.row(NOW)[-1] for each in (fine, expired)] == ["1 min", "1 min ago"]


def test_a_dead_request_is_deleted_with_force_as_a_node_from_the_queue_and_a_waiting_one_is_left_alone() -> None:
    waiting, suspended = (inventory.parse_queued(queued(state)) for state in ("WAITING_FOR_RESOURCES", "SUSPENDED"))
    assert inventory.find_leftovers([waiting, suspended], NOW, owner=ANN) == [suspended]
    assert waiting.cost(NOW) == 0
    command = "gcloud compute tpus queued-resources delete n --project=p --zone=us-central2-b --quiet --force"
    assert inventory.delete_command("p", suspended) == command.split()
    found = inventory.parse_node(node(queuedResource=f"{PARENT}/queuedResources/q"))
    assert inventory.delete_command("p", found)[3:6] == ["queued-resources", "delete", "q"]
    assert inventory.delete_command("p", inventory.parse_node(node()))[3:6] == ["tpu-vm", "delete", "n"]


@pytest.mark.parametrize("owner", ["ann", "bob"])
def test_a_request_of_another_owner_stays(cloud: Cloud, owner: str) -> None:
    cloud.made_by(EXPIRED)
    request = dead_request()
    request.resource["tpu"]["nodeSpec"][0]["node"]["labels"] = {**EXPIRED, "tpu-launch-owner": owner}
    request.resource["state"], request.state = {"state": "ACTIVE"}, "ACTIVE"
    cloud.state.queued[request.name] = request
    cloud.node().resource["queuedResource"] = request.name
    assert remove(cloud, leftover(cloud)) == "deleted"
    deleted = {call.split(maxsplit=1)[1] for call in cloud.calls if call.endswith("delete")}
    assert deleted == {"queued-resources delete" if owner == "ann" else "tpu-vm delete"}


@pytest.mark.parametrize("specs", [[{"multisliceParams": {"nodeCount": 2}}], [{"nodeId": "a"}, {"nodeId": "b"}], []])
def test_a_request_for_several_slices_is_not_ours_to_count(specs: list[dict[str, Any]]) -> None:
    assert inventory.parse_queued({"name": "a/b/c/d/e/f", "tpu": {"nodeSpec": specs}}) is None


def leftover(cloud: Cloud) -> inventory.OwnedSlice:
    """The one leftover of a list that was made now."""
    listed = inventory.list_owned("p", ["us-central2-b"], cloud.machine()).slices
    (found,) = inventory.find_leftovers(listed, cloud.clock.now, owner=ANN)
    return found


def remove(cloud: Cloud, listed: inventory.OwnedSlice) -> str:
    return inventory.remove("p", listed, lambda text: None, cloud.machine())


def test_a_slice_that_was_deleted_or_recreated_since_the_list_is_left_alone(cloud: Cloud) -> None:
    cloud.made_by(EXPIRED)
    listed = leftover(cloud)
    cloud.delete()
    assert remove(cloud, listed) == "left alone: it is being deleted"
    cloud.clock.sleep(60)
    assert remove(cloud, listed) == "gone already"
    cloud.made_by(EXPIRED)
    assert remove(cloud, listed) == "left alone: it was recreated since it was listed"
    assert cloud.node() is not None
    cloud.at(3.5, cloud.delete)  # between two lists, a description and the deletion
    assert remove(cloud, leftover(cloud)) == "left alone: it is being deleted"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tpu-launch-expires": "4000000000"}, "it is READY and no leftover any more"),
        ({"tpu-launch-owner": "bob"}, "its label tpu-launch-owner changed since it was listed"),
        ({"tpu-launch-account": "another"}, "its label tpu-launch-account changed since it was listed"),
        ({"tpu-launch": "0"}, "its label tpu-launch changed since it was listed"),
    ],
)
def test_a_slice_whose_labels_have_changed_is_left_alone(cloud: Cloud, change: dict[str, str], reason: str) -> None:
    cloud.made_by(EXPIRED)
    listed = leftover(cloud)
    found = cloud.node()
    found.resource["labels"] |= change
    assert remove(cloud, listed) == f"left alone: {reason}"
    assert cloud.node() is found


def test_a_deletion_that_another_operation_prevents_is_asked_for_again(cloud: Cloud) -> None:
    cloud.made_by(EXPIRED)
    listed, answers = leftover(cloud), [BUSY]
    cloud.trouble = lambda zone, command, now: answers.pop() if command.endswith("delete") and answers else None
    assert remove(cloud, listed) == "deleted"
    assert cloud.node() is None
    assert cloud.calls.count("us-central2-b tpu-vm delete") == 2
    cloud.made_by(EXPIRED)
    cloud.lost = lambda zone, command, now: UNAVAILABLE if command.endswith("delete") else None
    assert remove(cloud, leftover(cloud)) == "deleted", "although the answer was lost and Google shows it DELETING"
    assert "us-central2-b queued-resources describe" not in cloud.calls, "it came from no request"


def test_a_zone_that_can_not_be_listed_hides_no_other(cloud: Cloud) -> None:
    cloud.made_by(EXPIRED)
    cloud.trouble = lambda zone, command, now: UNAVAILABLE if zone == "us-west4-a" else None
    listing = inventory.list_owned("p", ["us-west4-a", "us-central2-b"], cloud.machine())
    assert [slice_.name for slice_ in listing.slices] == ["demo"]
    assert list(listing.failures) == ["us-west4-a"]


@pytest.mark.parametrize(("state", "kept"), [("ACTIVE", ["READY"]), ("SUSPENDED", ["SUSPENDED", "READY"])])
def test_a_node_and_a_dead_request_hide_each_other_never(cloud: Cloud, state: str, kept: list[str]) -> None:
    cloud.made_by(EXPIRED)
    request = dead_request()
    request.resource["state"], request.state = {"state": state}, state
    several = replace(request, resource={**request.resource, "tpu": {"nodeSpec": []}})  # slices: not ours to count
    cloud.state.queued |= {request.name: request, f"{request.name}s": several}
    for came_from, states in ("", kept), (request.name, kept[:1]):  # both cost: a node money, a request quota
        cloud.node().resource["queuedResource"] = came_from
        assert [each.state for each in inventory.list_owned("p", ["us-central2-b"], cloud.machine()).slices] == states


def test_gc_deletes_nothing_without_an_account(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.made_by(dict(EXPIRED))
    cloud.node().resource["labels"].pop("tpu-launch-account", None)
    monkeypatch.setattr(commands, "machine", lambda: cloud.machine(Owner("ann")))
    (tmp_path / "run.yaml").write_text(SLICE)
    gc = ["-f", str(tmp_path / "run.yaml"), "--yes"]
    for words, code in ([], Exit.CONFLICT), (["--all-owners"], Exit.OK):
        ended = CliRunner().invoke(commands.gc, [*gc, *words])
        assert (ended.exit_code, cloud.node() is None) == (code, code is Exit.OK), ended.output
        assert words or "--all-owners" in ended.output


def dead_request() -> QueuedResource:
    name, spec = f"{PARENT}/queuedResources/demo", {"acceleratorType": "v4-16", "labels": EXPIRED}
    resource = {**queued("SUSPENDED"), "name": name, "tpu": {"nodeSpec": [{"nodeId": "demo", "node": spec}]}}
    return QueuedResource(name, resource, f"{PARENT}/nodes/demo", "SUSPENDED", None)


def test_a_dead_request_is_not_deleted_under_a_live_slice_of_its_name(cloud: Cloud) -> None:
    request = dead_request()
    cloud.state.queued[request.name] = request
    cloud.made_by({key: value for key, value in EXPIRED.items() if not key.endswith("expires")})
    assert "did not come from it" in remove(cloud, leftover(cloud))
    cloud.clock.sleep(100)
    found = cloud.node()
    assert found.state == "READY"
    del cloud.state.nodes[request.node]
    # While its description is retried for minutes, the slice is there again.
    listed, begin = leftover(cloud), cloud.clock.now
    cloud.at(100, lambda: cloud.state.nodes.update({found.name: found}))
    cloud.trouble = lambda zone, command, now: (
        UNAVAILABLE if command == "queued-resources describe" and now - begin < 200 else None
    )
    assert "did not come from it" in remove(cloud, listed)
    del cloud.state.nodes[request.node]
    assert remove(cloud, listed) == "deleted"


@pytest.mark.parametrize(
    ("answer", "account"),
    [
        ("echo Ann@example.com", "ann@example.com"),
        ("echo 1-compute@developer.gserviceaccount.com", "1-compute@developer.gserviceaccount.com"),  # of a VM
        ("echo '(unset)' >&2; echo", ""),
        ("echo broken; exit 1", ""),
    ],
)
def test_the_account_is_gclouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, account: str) -> None:
    write_program(tmp_path / "bin", "gcloud", f'[ "$*" = "config get account --quiet" ] || exit 9\n{answer}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("CLOUDSDK_CORE_ACCOUNT")
    assert this_owner().account == hash_account(account)
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "")
        assert this_owner().account == "", "there is no gcloud"
    assert (hash_account(account) == "") == (account == "")
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", "c@d")
    assert this_owner().account == hash_account("C@d")


def test_labels_hold_what_google_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "Ann.Über@corp" + "x" * 80)
    user = this_owner().user
    assert (user[:13], len(user)) == ("ann--ber-corp", 63)
    assert len(hash_account("ann@example.com")) == 12
    monkeypatch.setattr("getpass.getuser", lambda: {}["getpwuid(): uid not found"])  # in a container
    assert this_owner().user.isdecimal()
