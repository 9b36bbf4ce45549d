"""The emulator's process: opens the sockets, wires the services together, and keeps hosts as the state says.

Started by control.start as `python -m launcher.emulator.server HOME`. It listens on 127.0.0.1 (Cloud TPU, Compute, Cloud Storage), on unix sockets
in a private folder (control, the workstation's engine, one a host for its agent), and on the listeners that hosts hand over. It holds a lock on
HOME/lock for its life, and can be killed at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from launcher.emulator import catalogue, faults, metadata, tpu_api
from launcher.emulator.bucket import Buckets
from launcher.emulator.bucket_api import StorageApi
from launcher.emulator.catalogue import ApiError
from launcher.emulator.engine import Refused
from launcher.emulator.engine_client import LABEL, MACHINE_LABEL, Engine, EngineError, UnixConnection, filters
from launcher.emulator.engine_proxy import Views
from launcher.emulator.lifecycle import Lifecycle
from launcher.emulator.machines import SHARED, Machines
from launcher.emulator.state import Fault, Host, Node, State, Store, from_json
from launcher.emulator.web import Acceptor, Request, Response, json_response, serve_http

log = logging.getLogger(__name__)

# Names of the sockets in the private folder.
CONTROL, ENGINE = "control.sock", "engine.sock"
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Server:
    """One emulator."""

    def __init__(self, home: Path, image: str) -> None:
        self.home = home
        state = from_json((home / "state.json").read_text())
        self.store = Store(state, home / "state.json")
        self.sockets = Path(state.sockets)
        self.engine = Engine(state.engine)
        self.machines = Machines(self.engine, state.id, image, self.sockets)
        self.buckets = Buckets(home / "buckets")
        self.storage = StorageApi(self.buckets)
        self.views = Views(self.store, self.engine, bind=self._bind)
        self.lifecycle = Lifecycle(self.store, self.machines, prepare=self._prepare)
        self.acceptor = Acceptor()
        self.handed_over: dict[str, list[socket.socket]] = {}  # hostname -> metadata, storage, engine
        self.control_sockets: dict[str, socket.socket] = {}
        self.lock = threading.RLock()
        self.stopping = threading.Event()

    def run(self, listener: socket.socket) -> None:
        """Serves until told to stop."""
        with self.store.change() as state:
            state.subnet = self.machines.ensure_network(state.subnet)
            state.pid = os.getpid()
            nodes = list(state.nodes.values())
            rebooted, state.boot = state.boot not in ("", BOOT.read_text()), BOOT.read_text()
        self.acceptor.start()
        for node in nodes:
            for host in node.hosts:
                self._prepare(node, host)
        if rebooted:  # of the workstation: it took the hosts down, and nobody meant it
            for node in nodes:
                for host in node.hosts if node.state == "READY" else []:
                    if not host.killed:
                        self.machines.start(host)
        self.acceptor.add(unix_listener(self.sockets / ENGINE, 0o600), self.views.serve_workstation)
        self.acceptor.add(listener, lambda connection: serve_http(connection, self.google))
        self.store.after_change = self.lifecycle.wake
        self.lifecycle.wake()
        threading.Thread(target=self._watch_deaths, name="deaths", daemon=True).start()
        threading.Thread(target=self._tick, name="tick", daemon=True).start()
        self.acceptor.add(unix_listener(self.sockets / CONTROL, 0o600), lambda connection: serve_http(connection, self.control))
        log.info("serving %s", self.home)
        self.stopping.wait()
        self.lifecycle.close()

    # -- Google's services ----------------------------------------------------------------------------------------------------------------

    def google(self, request: Request) -> Response:
        """One request on 127.0.0.1."""
        first = request.path.split("/")[1]
        if first in ("storage", "upload", "download", "resumable", "batch"):
            return self._faulty("storage", lambda: self.storage.answer(request))
        if first in ("v1", "v2", "v2alpha1", "compute"):
            return self._faulty("tpu", lambda: self._api(request))
        return json_response({"error": {"code": 404, "message": f"the emulator has no {request.path}", "status": "NOT_FOUND"}}, 404)

    def _api(self, request: Request) -> Response:
        try:
            segments = request.segments
            if segments[:3] == ["compute", "v1", "projects"] and len(segments) == 4 and request.method == "GET":
                return json_response(tpu_api.compute_project(segments[3]))
            locations_only = segments[0] == "v1" and segments[3:4] == ["locations"] and len(segments) <= 5
            if not (segments[0] in ("v2", "v2alpha1") or locations_only) or len(segments) < 3:
                raise ApiError(catalogue.NOT_FOUND, f"The requested URL was not found: {request.path}")
            call = tpu_api.parse(request.method, segments[1:], request.query, request.json())
            if call.method == "GET" or call.verb == "getGuestAttributes":
                with self.store.read() as state:
                    return json_response(tpu_api.answer(state, call, time.time()))
            with self.store.change() as state:
                try:
                    return json_response(tpu_api.answer(state, call, time.time()))
                except ApiError as error:  # answered inside, so that a fault which it consumed is written
                    return json_response(error.as_json(), catalogue.CODES[error.code][0])
        except ApiError as error:
            return json_response(error.as_json(), catalogue.CODES[error.code][0])
        except ValueError as error:
            return json_response(ApiError(catalogue.INVALID_ARGUMENT, f"Invalid JSON payload received. {error}").as_json(), 400)

    def _faulty(self, service: str, answer: Any) -> Response:
        """Answers, unless a fault says otherwise."""
        with self.store.read() as state:
            waiting, broken = faults.delay(state, service), any(each.kind == "errors" for each in state.faults)
        time.sleep(waiting)
        if broken:
            with self.store.change() as state:
                status = faults.error_status(state, service)
            if status is not None:
                text = "The service is currently unavailable." if status == 503 else f"injected fault: status {status}"
                name = {429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}.get(status, "UNKNOWN")
                return json_response(
                    {"error": {"code": status, "message": text, "status": name, "errors": [{"message": text, "reason": "backendError"}]}},
                    status,
                )
        result: Response = answer()
        return result

    # -- hosts ----------------------------------------------------------------------------------------------------------------------------

    def _prepare(self, node: Node, host: Host) -> None:
        """Opens the socket on which the host's agent will hand its listeners over."""
        with self.lock:
            if host.hostname in self.control_sockets:
                return
            folder = self.machines.folder(host)
            folder.mkdir(mode=0o755, exist_ok=True)
            listener = unix_listener(folder / "agent.sock", 0o600)
            self.control_sockets[host.hostname] = listener
            self.acceptor.add(listener, lambda connection: self._agent(host.hostname, connection))

    def _agent(self, hostname: str, connection: socket.socket) -> None:
        """Takes a host's listeners and serves on them until the agent goes away."""
        connection.setblocking(True)
        _, descriptors, _, _ = socket.recv_fds(connection, 64, 3)
        if len(descriptors) != 3:
            return
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        with self.lock:
            self.handed_over[hostname] = listeners
            with self.store.read() as state:
                found = find_host(state, hostname)
                cut = found is None or found[1].cut
            self.acceptor.add(listeners[2], lambda each: self.views.serve_host(hostname, each))
            if not cut:
                self._serve_google(hostname)
        with contextlib.suppress(OSError):
            while connection.recv(64):
                pass
        with self.lock:
            if self.handed_over.get(hostname) is listeners:
                del self.handed_over[hostname]
        for listener in listeners:
            self.acceptor.remove(listener, close=True)

    def _serve_google(self, hostname: str) -> None:
        """Metadata and storage, for a host that has its network."""
        listeners = self.handed_over.get(hostname)
        if listeners:
            self.acceptor.add(
                listeners[0], lambda each: serve_http(each, lambda request: self._for_host(hostname, request, self._metadata))
            )
            self.acceptor.add(listeners[1], lambda each: serve_http(each, lambda request: self._for_host(hostname, request, self._storage)))

    def _for_host(self, hostname: str, request: Request, answer: Any) -> Response:
        """A cut-off host gets no answer at all until its network is back."""
        self.store.wait(lambda state: (found := find_host(state, hostname)) is None or not found[1].cut, timeout=3600)
        result: Response = answer(hostname, request)
        return result

    def _metadata(self, hostname: str, request: Request) -> Response:
        return self._faulty("metadata", lambda: metadata.answer(self.store, lambda state: find_host(state, hostname), request))

    def _storage(self, hostname: str, request: Request) -> Response:
        return self._faulty("storage", lambda: self.storage.answer(request))

    def _bind(self, hostname: str, path: str) -> str:
        """A folder of a host, as the workstation's engine knows it. Raises Refused."""
        with self.store.read() as state:
            found = find_host(state, hostname)
        if found is None:
            raise Refused(409, f"host {hostname} is gone")
        real = self._real_path(hostname, path)
        for shared in SHARED:
            if real == shared or real.startswith(shared + "/"):
                return str(self.machines.volume_folder(found[1], shared)) + real.removeprefix(shared)
        raise Refused(400, f"invalid bind source {path}: an emulated TPU VM shares only {', '.join(SHARED)} with its containers")

    def _real_path(self, hostname: str, path: str) -> str:
        """The path without symbolic links, as the host sees it: a link must not lead out of what is shared."""
        body = {"AttachStdout": True, "Tty": True, "Cmd": ["realpath", "-m", "--", path]}
        identifier = self.engine.call("POST", f"/containers/{hostname}/exec", body=body)["Id"]
        _, data = self.engine.raw("POST", f"/exec/{identifier}/start", body={"Tty": True})
        return data.decode(errors="replace").strip()

    # -- faults that touch hosts ----------------------------------------------------------------------------------------------------------

    def kill_host(self, host: Host) -> None:
        self.machines.kill(host)

    def cut_host(self, host: Host) -> None:
        with self.lock:
            for listener in self.handed_over.get(host.hostname, [])[:2]:
                self.acceptor.remove(listener, close=False)
        self.machines.cut(host)

    def restore_host(self, host: Host) -> None:
        """Undoes kill_host and cut_host, and starts a host that somebody else killed."""
        with self.store.change():
            cut = host.cut
            host.killed, host.cut, host.restore_at = False, False, None
        if cut:
            self.machines.join(host)
            with self.lock:
                self._serve_google(host.hostname)
        self.machines.start(host)

    def _tick(self) -> None:
        """Brings hosts back whose time has come, and forgets sockets of hosts that are gone."""
        while not self.stopping.wait(0.25):
            try:
                now = time.time()
                with self.store.read() as state:
                    due = [host for host in all_hosts(state) if host.restore_at is not None and host.restore_at <= now]
                    names = {host.hostname for host in all_hosts(state)}
                for host in due:
                    self.restore_host(host)
                with self.lock:
                    gone = [name for name in self.control_sockets if name not in names]
                    for name in gone:
                        self.acceptor.remove(self.control_sockets.pop(name), close=True)
                        shutil.rmtree(self.sockets / name, ignore_errors=True)
            except (OSError, EngineError):
                log.exception("tick")

    def _watch_deaths(self) -> None:
        """What runs on a host dies with it, whoever killed it; also what died while no server was there."""
        with self.store.read() as state:
            emulator = state.id
        query = {"filters": filters(label=[f"{LABEL}={emulator}", MACHINE_LABEL], event=["die"], type=["container"])}
        while not self.stopping.is_set():
            try:
                connection = UnixConnection(self.engine.path, timeout=None)
                connection.request("GET", "/events?" + urlencode(query))
                response = connection.getresponse()
                for each in self.engine.containers(f"{LABEL}={emulator}", MACHINE_LABEL):
                    if each["State"] != "running":
                        self.machines.kill_own(each["Names"][0].removeprefix("/"))
                while line := response.readline():
                    name = json.loads(line)["Actor"]["Attributes"]["name"]
                    threading.Thread(target=self.machines.kill_own, args=(name,), daemon=True).start()
            except (OSError, ValueError, KeyError, EngineError, http.client.HTTPException):
                log.exception("watching the engine's events")
            time.sleep(0.5)

    # -- control --------------------------------------------------------------------------------------------------------------------------

    def control(self, request: Request) -> Response:
        """Requests of control.py, over the private socket."""
        try:
            match (request.method, request.path):
                case ("GET", "/status"):
                    return json_response(self.status())
                case ("POST", "/inject"):
                    return json_response(self.inject(request.json()))
                case ("POST", "/bucket"):
                    self.buckets.ensure(str(request.json()["name"]))
                    return json_response({})
                case ("POST", "/stop"):
                    threading.Timer(0.1, self.stopping.set).start()
                    return json_response({"pid": os.getpid()})
            return json_response({"error": f"no {request.path}"}, 404)
        except (faults.NoSuchTarget, ValueError) as error:
            return json_response({"error": str(error)}, 400)
        except (OSError, EngineError) as error:
            return json_response({"error": f"the engine failed: {error}"}, 500)

    def status(self) -> dict[str, Any]:
        """Everything there is, for people and scripts."""
        with self.store.read() as state:
            emulator = state.id
            listed: dict[str, Any] = {
                "id": emulator,
                "home": str(self.home),
                "pid": os.getpid(),
                "endpoint": f"http://127.0.0.1:{state.port}",
                "docker_host": f"unix://{self.sockets / ENGINE}",
                "subnet": state.subnet,
                "nodes": [self._status_of(node) for node in state.nodes.values()],
                "operations": [tpu_api.operation_json(each) for each in state.operations.values() if not each.done],
                "pushed": {repository: dict(versions) for repository, versions in state.pushed.items()},
                "faults": [vars(fault) for fault in state.faults],
            }
        containers = {each["Names"][0].removeprefix("/"): each for each in self.engine.containers(f"{LABEL}={emulator}")}
        for node in listed["nodes"]:
            for host in node["hosts"]:
                host["state"] = containers[host["hostname"]]["State"] if host["hostname"] in containers else "none"
                prefix = host["hostname"] + "."
                host["containers"] = {
                    name.removeprefix(prefix): each["State"] for name, each in containers.items() if name.startswith(prefix)
                }
        return {**listed, "buckets": self.buckets.summary()}

    @staticmethod
    def _status_of(node: Node) -> dict[str, Any]:
        hosts = [
            {"worker": host.index, "hostname": host.hostname, "address": host.address, "killed": host.killed, "cut": host.cut}
            for host in node.hosts
        ]
        return {"name": node.name, "state": node.state, "accelerator_type": node.resource["acceleratorType"], "hosts": hosts}

    def inject(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """A fault, as commands.py describes it: {"fault": ..., and its arguments}."""
        kind = wanted.pop("fault")
        if kind in ("preempt", "kill-host", "cut-host", "restore-host"):
            return self._inject_host(kind, wanted)
        with self.store.change() as state:
            if kind == "clear":
                state.faults.clear()
                broken = [host for host in all_hosts(state) if host.killed or host.cut]
            else:
                state.faults.append(Fault(**{"kind": kind, "service": "tpu", **wanted}))
                broken = []
        for host in broken:
            self.restore_host(host)
        return {"fault": kind, "restored": [host.hostname for host in broken]}

    def _inject_host(self, kind: str, wanted: dict[str, Any]) -> dict[str, Any]:
        with self.store.change() as state:
            node = faults.find_node(state, wanted["node"])
            if kind == "preempt":
                hosts = list(node.hosts)
                if node.state not in ("READY", "STOPPED"):
                    raise ValueError(f"node {node.short_name} is {node.state}; only a READY one can be preempted")
                node.resource["state"] = "PREEMPTED"
                node.resource.pop("health", None)
            else:
                host = faults.find_host(state, wanted["node"], wanted["worker"])
                if kind == "restore-host" and node.state != "READY":
                    raise ValueError(f"node {node.short_name} is {node.state}; only hosts of a READY one can be restored")
                hosts = [host]
                if kind != "restore-host":
                    host.killed, host.cut = host.killed or kind == "kill-host", host.cut or kind == "cut-host"
                    host.restore_at = time.time() + wanted["seconds"] if wanted.get("seconds") else None
        act = {"preempt": self.kill_host, "kill-host": self.kill_host, "cut-host": self.cut_host, "restore-host": self.restore_host}[kind]
        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            list(pool.map(act, hosts))
        return {"fault": kind, "node": node.name, "hosts": [host.hostname for host in hosts]}


def all_hosts(state: State) -> list[Host]:
    return [host for node in state.nodes.values() for host in node.hosts]


def find_host(state: State, hostname: str) -> tuple[Node, Host] | None:
    for node in state.nodes.values():
        for host in node.hosts:
            if host.hostname == hostname:
                return node, host
    return None


def unix_listener(path: Path, mode: int) -> socket.socket:
    """A listening unix socket; one that a killed server left behind is replaced."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(mode)
    listener.listen(512)
    return listener


def main() -> None:
    home, image = Path(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s")
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("another server of this emulator is running")
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())  # for control.py, which may have to kill us
    port = from_json((home / "state.json").read_text()).port
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=512)
    except OSError as error:
        sys.exit(f"port {port} of 127.0.0.1: {error}")
    server = Server(home, image)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stopping.set())
    server.run(listener)


if __name__ == "__main__":
    main()
