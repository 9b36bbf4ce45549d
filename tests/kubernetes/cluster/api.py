"""The API server, as far as kubectl needs it: discovery, objects, watches, logs, a Role's rights, strict validation."""

import copy
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kubernetes import schemas
from tests.kubernetes.cluster.controllers import delete_pod
from tests.kubernetes.cluster.nodes import Nodes
from tests.kubernetes.cluster.store import RESOURCES, Object, Resource, Store, now

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_PATH = re.compile(
    r"/(?:api/v1|"
    r"apis/[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)


class Refused(Exception):
    """A refused request, answered with a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass
class Api:
    """The state of the server. `role`: the RBAC rules of its one user."""

    store: Store
    nodes: Nodes
    role: list[Object]
    user: str = "alice@example.com"
    missing: set[str] = field(default_factory=set)  # resources without an installed definition

    def resources(self) -> dict[str, Resource]:
        return {name: each for name, each in RESOURCES.items() if name not in self.missing}

    def authorise(self, verb: str, resource: str, sub: str, namespace: str) -> None:
        group, full = RESOURCES[resource].group, f"{resource}/{sub}" if sub else resource
        for rule in self.role:
            if group in rule["apiGroups"] and full in rule["resources"] and verb in rule["verbs"]:
                return
        where = f' in the namespace "{namespace}"' if RESOURCES[resource].namespaced else " at the cluster scope"
        subject = f"{resource}.{group}" if group else resource
        wanted = f'{verb} resource "{full}" in API group "{group}"{where}'
        raise Refused(403, "Forbidden", f'{subject} is forbidden: User "{self.user}" cannot {wanted}')

    def discovery(self, path: str) -> Object | None:
        """Returns the answer to a discovery request; None for other paths."""
        resources = self.resources()
        grouped = [each for each in resources.values() if each.group]
        groups = {each.group: {"groupVersion": each.api_version, "version": each.version} for each in grouped}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            listed = [{"name": each, "versions": [groups[each]], "preferredVersion": groups[each]} for each in groups]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        if path == "/version":
            return {"major": "1", "minor": "32", "gitVersion": "v1.32.4"}
        served = {f"api{'s' if each.group else ''}/{each.api_version}": each.api_version for each in resources.values()}
        if path == "/openapi/v3":
            return {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}?hash=1"} for each in sorted(served)}}
        version = served.get(path.removeprefix("/openapi/v3").lstrip("/"))
        if version is None:
            return None
        kinds = {name: each for name, each in resources.items() if each.api_version == version}
        return self._openapi(path, kinds) if path.startswith("/openapi") else self._listed(version, kinds)

    def _listed(self, version: str, kinds: dict[str, Resource]) -> Object:
        found = [
            {
                "name": name,
                "singularName": each.kind.lower(),
                "namespaced": each.namespaced,
                "kind": each.kind,
                "verbs": _VERBS,
            }
            for name, each in kinds.items()
        ]
        log = {"name": "pods/log", "singularName": "", "namespaced": True, "kind": "Pod", "verbs": ["get"]}
        about = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
        return {**about, "resources": [*found, *([log] if "pods" in kinds else [])]}

    def _openapi(self, path: str, kinds: dict[str, Resource]) -> Object:
        """Returns the OpenAPI document that announces strict validation of every kind."""
        parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
        same = {"parameters": parameters, "responses": {"200": {"description": "OK"}}}
        base = path.removeprefix("/openapi/v3")
        paths = {}
        for name, each in kinds.items():
            kind = {"group": each.group, "version": each.version, "kind": each.kind}
            operation = {"x-kubernetes-group-version-kind": kind, **same}
            paths[f"{base}/namespaces/{{namespace}}/{name}/{{name}}"] = {"patch": operation}
        return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.32.4"}, "paths": paths}

    # -- objects

    def create(self, resource: str, document: Object) -> Object:
        if resource in self.missing:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        mistakes = schemas.mistakes(document)
        if mistakes:
            kind = f"{document['kind']} in version {document['apiVersion']!r}"
            raise Refused(400, "BadRequest", f"{kind} cannot be handled: strict decoding error: {mistakes[0]}")
        with self.store.lock:
            if self.store.get(resource, document["metadata"]["name"]):
                raise Refused(409, "AlreadyExists", f'{resource} "{document["metadata"]["name"]}" already exists')
            return self.store.create(resource, document)

    def found(self, resource: str, name: str) -> Object:
        document = self.store.get(resource, name)
        if document is None:
            group = RESOURCES[resource].group
            raise Refused(404, "NotFound", f'{resource + "." + group if group else resource} "{name}" not found')
        return document

    def patch(self, resource: str, name: str, change: Object) -> Object:
        """Applies a merge patch of metadata, the only patch that tpu-launch makes."""
        document = self.found(resource, name)
        assert change.keys() == {"metadata"}, change
        document["metadata"] |= change["metadata"]
        self.store.put(resource, document)
        return document

    def delete(self, resource: str, name: str, options: Object) -> Object:
        document = self.found(resource, name)
        if resource == "pods":
            delete_pod(self.store, name, options.get("gracePeriodSeconds"))
        elif resource in ("jobsets", "jobs"):
            document["metadata"]["deletionTimestamp"] = now()
            self.store.put(resource, document)
        else:
            self.store.remove(resource, name)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


def serve(api: Api) -> ThreadingHTTPServer:
    """Starts an API server at a free port of this machine. Stop it with `shutdown` and `server_close`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": api}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    api: Api
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_PATCH = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self._route(body)
        except Refused as error:
            status = {"status": "Failure", "message": str(error), "reason": error.reason, "code": error.code}
            self._json({"kind": "Status", "apiVersion": "v1", "metadata": {}, **status}, error.code)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        api = self.api
        about = api.discovery(parts.path)
        if about is not None:
            return self._json(about)
        match = _PATH.fullmatch(parts.path)
        if not match or match["resource"] not in api.resources():
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        resource, name = match["resource"], match["name"]
        sub, namespace = match["sub"] or "", match["namespace"] or "default"
        watching = query.get("watch") in ("true", "1")
        verbs = {"POST": "create", "DELETE": "delete", "PATCH": "patch"}
        verb = verbs.get(self.command, "get" if name else "watch" if watching else "list")
        api.authorise(verb, resource, sub, namespace)
        selector = query.get("labelSelector", "").replace("==", "=")
        labels = dict(each.split("=", 1) for each in selector.split(",") if each)
        if sub == "log":
            return self._log(api.found(resource, name), query)
        if verb == "create":
            return self._json(api.create(resource, json.loads(body)), 201)
        if verb == "delete":
            return self._json(api.delete(resource, name, json.loads(body) if body else {}))
        if verb == "get":
            return self._json(api.found(resource, name))
        if verb == "patch":
            return self._json(api.patch(resource, name, json.loads(body)))
        if verb == "watch":
            since, seconds = int(query.get("resourceVersion") or 0), float(query.get("timeoutSeconds") or 3600)
            return self._watch(resource, labels, since, seconds)
        if verb == "list":
            with api.store.lock:
                items, version = api.store.all(resource, labels), api.store.version
            kind = RESOURCES[resource]
            about = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version}
            return self._json({**about, "metadata": {"resourceVersion": str(version)}, "items": items})
        raise Refused(405, "MethodNotAllowed", f"{verb} is not done here")

    def _json(self, document: Object, code: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, chunks: Iterable[bytes], content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _watch(self, resource: str, labels: dict[str, str], version: int, seconds: float) -> None:
        def events() -> Iterable[bytes]:
            last, deadline, store = version, time.monotonic() + seconds, self.api.store
            while time.monotonic() < deadline:
                with store.lock:
                    found = [copy.deepcopy(each) for each in store.after(last, resource)]
                    if not found:
                        store.changed.wait(1.0)
                for event in found:
                    last = event.version
                    own = event.object["metadata"].get("labels", {})
                    if labels.items() <= own.items():
                        yield json.dumps({"type": event.type, "object": event.object}).encode() + b"\n"

        self._stream(events(), "application/json")

    def _log(self, pod: Object, query: dict[str, str]) -> None:
        statuses = pod["status"].get("containerStatuses", [])
        if not statuses or "waiting" in statuses[0]["state"]:
            container = pod["spec"]["containers"][0]["name"]
            where = f'container "{container}" in pod "{pod["metadata"]["name"]}"'
            raise Refused(400, "BadRequest", f"{where} is waiting to start: ContainerCreating")
        since = ["--since", query["sinceTime"]] if "sinceTime" in query else []
        follow = ["--follow"] if query.get("follow") == "true" else []
        stamped = query.get("timestamps") == "true"
        nodes = self.api.nodes
        argv = [nodes.docker, "logs", "--timestamps", *since, *follow, nodes.container_of(pod)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        left = int(query.get("limitBytes", 1 << 40))

        def lines() -> Iterable[bytes]:
            nonlocal left
            for line in process.stdout:
                data = (line if stamped else line.partition(b" ")[2])[:left]
                left -= len(data)
                if data:
                    yield data
                if left <= 0:
                    return

        try:
            self._stream(lines(), "text/plain")
        finally:
            process.kill()
            process.wait()
