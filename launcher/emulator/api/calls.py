"""All calls of Google's APIs that the emulator answers: of Cloud TPU v2, and gcloud's to Compute and Artifact Registry.

`answer(state, call, now)` changes the state and returns Google's answer. Nothing here starts a container: a change
enters a pending operation into the state, operations.py does its work on the hosts, and nodes.finish_operation ends it.

Reference: gcloud 528, generated_clients/apis/tpu/v2/tpu_v2_{client,messages}.py.
"""

from dataclasses import dataclass, field
from typing import Any

from launcher.emulator import registry
from launcher.emulator.api import catalogue, nodes, queued_resources
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.state import EmulatorState


@dataclass(frozen=True)
class Call:
    """An API call, without its transport."""

    method: str
    path: tuple[str, ...]  # decoded parts after the version: ("projects", "p", ...), the last without its ":verb"
    verb: str = ""  # "stop" of nodes/n:stop
    query: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)


def parse(method: str, segments: list[str], query: dict[str, str], body: dict[str, Any]) -> Call:
    """Returns the API call of an HTTP request; `segments` are the decoded parts of its path after the version."""
    *parents, last = segments or [""]
    head, separator, verb = last.partition(":")
    return Call(method, (*parents, head), verb if separator else "", query, body)


def answer(state: EmulatorState, call: Call, now: float) -> dict[str, Any]:
    """Carries out a call by changing `state` alone: work on hosts is entered as a pending operation. Returns the
    response's JSON. Raises ApiError, also after a fault was used up. The zone "-" lists nodes, queued resources and
    runtime versions of all zones."""
    query, body = call.query, call.body
    match (call.method, *call.path):
        case ("GET", "projects", project):
            return nodes.compute_project(project)
        case ("GET", "projects", project, "locations"):
            names = [{"name": f"projects/{project}/locations/{zone}", "locationId": zone} for zone in catalogue.ZONES]
            return {"locations": names}
        case (_, "projects", _, "locations", _, "repositories", *rest):
            return registry.answer_repositories(state, call.method, "/".join(call.path[:5]), rest, query, body)
        case (_, "projects", _, "locations", zone, *rest):
            if zone != "-" or not rest:
                catalogue.check_zone(zone)
        case _:
            raise _no_method(call)
    parent, name = "/".join(call.path[:4]), "/".join(call.path)
    prefix = parent.removesuffix("-") if zone == "-" else f"{parent}/"
    match (call.method, rest, call.verb):
        case ("GET", [], ""):
            return {"name": parent, "locationId": zone}
        case ("GET", ["nodes" as kind], ""):
            return {
                kind: [nodes.node_json(node) for key, node in sorted(state.nodes.items()) if key.startswith(prefix)]
            }
        case ("POST", ["nodes"], ""):
            return nodes.operation_json(nodes.create(state, parent, query.get("nodeId", ""), body, now))
        case ("GET", ["nodes", _], ""):
            return nodes.node_json(catalogue.find(state.nodes, name))
        case ("DELETE", ["nodes", _], ""):
            return nodes.operation_json(nodes.delete(state, catalogue.find(state.nodes, name), now))
        case ("PATCH", ["nodes", _], ""):
            node = catalogue.find(state.nodes, name)
            return nodes.operation_json(nodes.update(state, node, query.get("updateMask", ""), body, now))
        case ("POST", ["nodes", _], "getGuestAttributes"):
            return nodes.guest_attributes(catalogue.find(state.nodes, name), body)
        case ("POST", ["nodes", _], "stop" | "start"):
            node = catalogue.find(state.nodes, name)
            return nodes.operation_json(nodes.stop_or_start(state, node, call.verb, now))
        case ("GET", ["queuedResources" as kind], ""):
            found = [queued for key, queued in sorted(state.queued.items()) if key.startswith(prefix)]
            return {kind: [queued_resources.to_json(queued) for queued in found]}
        case ("POST", ["queuedResources"], ""):
            queued_id = query.get("queuedResourceId", "")
            return nodes.operation_json(queued_resources.create(state, parent, queued_id, body, now))
        case ("GET", ["queuedResources", _], ""):
            return queued_resources.to_json(catalogue.find(state.queued, name))
        case ("DELETE", ["queuedResources", _], ""):
            queued, force = catalogue.find(state.queued, name), query.get("force", "").lower() == "true"
            return nodes.operation_json(queued_resources.delete(state, queued, force, now))
        case ("GET", ["operations", _], ""):
            return nodes.operation_json(catalogue.find(state.operations, name))
        case ("GET", ["acceleratorTypes" as kind], ""):
            return {kind: [nodes.accelerator_json(name, offered) for offered in catalogue.accelerators_in(zone)]}
        case ("GET", ["runtimeVersions" as kind], ""):
            return {kind: [{"name": f"{name}/{each}", "version": each} for each in catalogue.runtime_versions()]}
    raise _no_method(call)


def _no_method(call: Call) -> ApiError:
    """Returns the error for a call that the API does not have."""
    return ApiError(catalogue.NOT_FOUND, f"The requested URL was not found: {call.method} /v2/{'/'.join(call.path)}")
