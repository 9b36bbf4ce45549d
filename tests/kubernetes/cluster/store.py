"""The objects of the cluster in memory, their versions, and all changes in order. One namespace."""

import copy
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    group: str
    version: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


RESOURCES = {
    "configmaps": Resource("", "v1", "ConfigMap"),
    "nodes": Resource("", "v1", "Node", namespaced=False),
    "pods": Resource("", "v1", "Pod"),
    "secrets": Resource("", "v1", "Secret"),
    "services": Resource("", "v1", "Service"),
    "serviceaccounts": Resource("", "v1", "ServiceAccount"),
    "deployments": Resource("apps", "v1", "Deployment"),
    "jobs": Resource("batch", "v1", "Job"),
    "jobsets": Resource("jobset.x-k8s.io", "v1alpha2", "JobSet"),
}


@dataclass(frozen=True)
class Event:
    version: int
    resource: str
    type: str  # ADDED, MODIFIED, DELETED
    object: Object


class Store:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.version = 1
        self.events: list[Event] = []
        self._objects: dict[tuple[str, str], Object] = {}

    def create(self, resource: str, document: Object) -> Object:
        with self.lock:
            name = document["metadata"]["name"]
            assert (resource, name) not in self._objects
            made = copy.deepcopy(document)
            made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            if RESOURCES[resource].namespaced:
                made["metadata"].setdefault("namespace", "default")
            made.setdefault("apiVersion", RESOURCES[resource].api_version)
            made.setdefault("kind", RESOURCES[resource].kind)
            self._keep(resource, made, "ADDED")
            return copy.deepcopy(made)

    def get(self, resource: str, name: str) -> Object | None:
        with self.lock:
            return copy.deepcopy(self._objects.get((resource, name)))

    def all(self, resource: str, labels: dict[str, str] | None = None) -> list[Object]:
        with self.lock:
            found = [each for (kind, _), each in sorted(self._objects.items()) if kind == resource]
            return [copy.deepcopy(each) for each in found if has(each, labels or {})]

    def put(self, resource: str, document: Object) -> None:
        """Stores a changed object. Does nothing if it did not change, or was deleted."""
        with self.lock:
            known = self._objects.get((resource, document["metadata"]["name"]))
            if known is None or known["metadata"]["uid"] != document["metadata"]["uid"]:
                return
            document = copy.deepcopy(document)
            document["metadata"]["resourceVersion"] = known["metadata"]["resourceVersion"]
            if document != known:
                self._keep(resource, document, "MODIFIED")

    def remove(self, resource: str, name: str) -> None:
        with self.lock:
            known = self._objects.pop((resource, name), None)
            if known is not None:
                self._happened(resource, known, "DELETED")
                self._collect_garbage(known["metadata"]["uid"])

    def _collect_garbage(self, owner: str) -> None:
        """Removes the Secrets and ConfigMaps that a removed object owned; the Job controller removes pods."""
        for (kind, name), document in list(self._objects.items()):
            owners = [reference["uid"] for reference in document["metadata"].get("ownerReferences", [])]
            if kind in ("secrets", "configmaps") and owner in owners:
                self.remove(kind, name)

    def after(self, version: int, resource: str) -> Iterator[Event]:
        with self.lock:
            yield from [event for event in self.events if event.version > version and event.resource == resource]

    def _keep(self, resource: str, document: Object, type_: str) -> None:
        self._objects[resource, document["metadata"]["name"]] = document
        self._happened(resource, document, type_)

    def _happened(self, resource: str, document: Object, type_: str) -> None:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self.events.append(Event(self.version, resource, type_, copy.deepcopy(document)))
        self.changed.notify_all()


def has(document: Object, labels: dict[str, str]) -> bool:
    own = document["metadata"].get("labels", {})
    return all(own.get(key) == value for key, value in labels.items())


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(document: Object, type_: str) -> Object | None:
    conditions = document.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == type_ and each["status"] == "True"), None)


def set_condition(document: Object, type_: str, reason: str, message: str, status: str = "True") -> None:
    status_of = document.setdefault("status", {})
    kept = [each for each in status_of.get("conditions", []) if each["type"] != type_]
    new = {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}
    status_of["conditions"] = [*kept, new]
