"""The emulator's process: opens the sockets, connects the services, and keeps hosts as the state has them.

control.start runs it as `python -m launcher.emulator.server HOME IMAGE VOLUME`. It listens on 127.0.0.1 (Cloud TPU,
Compute, Cloud Storage), on unix sockets in a private folder (control, the workstation's engine, one for each host's
agent), and on the listeners that hosts hand over. It holds a lock on HOME/lock while it runs, and can be killed at any
moment.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from launcher.emulator import faults, registry, storage
from launcher.emulator.api import calls, catalogue, queued_resources, stock
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.bucket import Buckets
from launcher.emulator.http_server import HttpRequest, HttpResponse, accept, json_response, serve_http
from launcher.emulator.operations import OperationRunner
from launcher.emulator.state import Node, Store, from_json
from launcher.emulator.tls import CA_FILE, serve_tls, tls_context
from launcher.emulator.vm import metadata
from launcher.emulator.vm.engine_client import LABEL, Engine, EngineError
from launcher.emulator.vm.engine_images import EngineImages
from launcher.emulator.vm.engine_proxy import EngineProxy
from launcher.emulator.vm.hosts import Hosts, in_parallel, unix_listener
from launcher.home import lock, write_private

log = logging.getLogger(__name__)

# Names of the sockets in the private folder.
CONTROL, ENGINE = "control.sock", "engine.sock"
ACCESS_TOKEN = Path("user") / "access-token"  # below the home: the token of the workstation's account, for gcloud
TIMER_SECONDS = 0.25  # between passes over timers, queued resources and stock
_INJECTED_ERRORS = {
    403: ("PERMISSION_DENIED", "Permission 'tpu.nodes.get' denied on resource (or it may not exist)."),
    409: ("ABORTED", "unable to queue the operation"),
    429: (
        "RESOURCE_EXHAUSTED",
        "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute' of service "
        "'tpu.googleapis.com' for consumer 'project_number:1'.",
    ),
    500: ("INTERNAL", "Internal error encountered."),
    503: ("UNAVAILABLE", "The service is currently unavailable."),
    504: ("DEADLINE_EXCEEDED", "Deadline expired before operation could complete."),
}


class Server:
    """One emulator."""

    def __init__(self, home: Path, image: str, tpu_volume: str) -> None:
        """Reads the state, makes a new certificate and connects the services. Listens on nothing yet."""
        self.home = home
        state = from_json((home / "state.json").read_text())
        self.store = Store(state, home / "state.json")
        self.sockets = Path(state.sockets)
        self.engine = Engine(state.engine)
        self.buckets = Buckets(home / "buckets")
        self.tls = tls_context(self.sockets, (*storage.NAMES, *registry.NAMES))
        self.token = state.token
        self.registry = registry.EmulatedRegistry(home / "registry", self.store)
        self.hosts = Hosts(
            self.store,
            self.engine,
            state.id,
            image,
            self.sockets,
            services=lambda hostname: [
                partial(serve_http, handler=partial(self._metadata, hostname)),
                partial(serve_http, handler=partial(self._host_storage, hostname)),
                partial(serve_tls, context=self.tls, handler=partial(self._host_storage, hostname)),
                partial(self.engine_proxy.serve_host, hostname),
            ],
        )
        self.engine_proxy = EngineProxy(
            self.store,
            self.engine,
            EngineImages(self.store, self.engine, self.registry),
            bind=self.hosts.bind,
            ca=self.sockets / CA_FILE,
            emulator=state.id,
            tpu_volume=tpu_volume,
        )
        self.operations = OperationRunner(self.store, self.hosts)
        self.stopping = threading.Event()

    def run(self) -> None:
        """Opens the sockets, makes the hosts' network, writes gcloud's access token, starts hosts that went down
        meanwhile, continues pending operations, and serves until `stopping` is set. Then waits up to 10 s for hosts
        that are being made. Raises EngineError without a network."""
        write_private(self.home / ACCESS_TOKEN, self.token)
        with self.store.change() as state:
            google, images = open_listener(state.port), open_listener(state.registry_port)
            state.port, state.registry_port = google.getsockname()[1], images.getsockname()[1]
            state.subnet = self.hosts.ensure_network(state.subnet)
        self.hosts.resume()
        self.store.after_change = self.operations.wake
        self.operations.wake()
        for run in (self.hosts.watch_deaths, self._run_timers):
            threading.Thread(target=run, name=run.__name__, daemon=True).start()
        listeners = {
            unix_listener(self.sockets / ENGINE): self.engine_proxy.serve_workstation,
            google: partial(serve_http, handler=self.google),
            images: partial(serve_tls, context=self.tls, handler=self.registry.answer),
            unix_listener(self.sockets / CONTROL): partial(serve_http, handler=self.control),
        }
        threading.Thread(target=accept, args=(listeners,), name="accept", daemon=True).start()
        log.info("serving %s", self.home)
        self.stopping.wait()
        self.operations.close()

    def _run_timers(self) -> None:
        """Ends outages and faults of hosts, and advances queue and stock, until the server stops; logs errors."""
        while not self.stopping.wait(TIMER_SECONDS):
            for act in (self.hosts.run_timers, self._advance_queue):
                try:
                    act()
                except Exception:
                    log.exception("timers")

    def _advance_queue(self) -> None:
        """Grants and expires queued resources, and preempts slices if the stock falls."""
        with self.store.read() as state:
            if not state.queued and (state.stock is None or not state.nodes):
                return
        with self.store.change() as state:
            now = time.time()
            queued_resources.advance(state, now)
            taken = stock.taken(state, now)
            for node in taken:
                log.info("the stock falls: %s is preempted", node.name)
                faults.preempt(node)
            doomed = [host for node in taken for host in node.hosts]
        in_parallel(self.hosts.kill, doomed)

    # -- Google's services

    def google(self, request: HttpRequest) -> HttpResponse:
        """Answers a request on 127.0.0.1 to Cloud Storage, Cloud TPU, Compute or Artifact Registry, with injected
        faults; else 404. Other users of this machine, who lack the token, and web pages get 403."""
        token = request.login[1] or request.headers.get("Authorization", "").removeprefix("Bearer ")
        host = request.headers.get("Host", "").partition(":")[0]
        if token != self.token or "Origin" in request.headers or host not in ("127.0.0.1", "localhost"):
            text = "use the variables of `tpu-launch emulator start --environment`: each emulator has its own token"
            return _error(403, "PERMISSION_DENIED", text)
        first = request.path.split("/")[1]
        if first in ("storage", "upload", "download", "resumable"):
            return self._storage(request)
        if first in ("v1", "v2", "v2alpha1", "compute"):
            return self._faulty("tpu", lambda: self._api(request))
        return _error(404, "NOT_FOUND", f"the emulator has no {request.path}")

    def _api(self, request: HttpRequest) -> HttpResponse:
        """Answers a call of Cloud TPU, Compute or Artifact Registry; errors are responses too."""
        segments = request.segments
        try:
            path = segments[2:] if segments[0] == "compute" else segments[1:]
            call = calls.parse(request.method, path, request.query, request.json())
            reads = call.method == "GET" or call.verb == "getGuestAttributes"
            with self.store.read() if reads else self.store.change() as state:
                try:
                    return json_response(calls.answer(state, call, time.time()))
                except ApiError as error:  # answer inside the block: a fault that was used up must be written
                    return json_response(error.as_json(), error.status)
        except ValueError as error:
            text = f"Invalid JSON payload received. {error}"
            return json_response(ApiError(catalogue.INVALID_ARGUMENT, text).as_json(), 400)

    def _storage(self, request: HttpRequest) -> HttpResponse:
        """Answers a Cloud Storage request, with the delays and errors of `_faulty`; an object-user fault refuses
        requests about buckets themselves."""
        with self.store.read() as state:
            refuses = any(fault.kind == "object-user" for fault in state.faults)
        refusal = storage.refuse_buckets(request) if refuses else None
        return self._faulty("storage", lambda: refusal or storage.answer(self.buckets, request))

    def _host_storage(self, hostname: str, request: HttpRequest) -> HttpResponse:
        """Waits while a host is cut off, up to 1 h, then answers its Cloud Storage request. Raises Disconnected."""
        self.hosts.await_network(hostname)
        return self._storage(request)

    def _metadata(self, hostname: str, request: HttpRequest) -> HttpResponse:
        """Waits as `_host_storage`, then answers a host's metadata request, or below /v2/ its call of Cloud TPU."""
        self.hosts.await_network(hostname)
        if request.path.startswith("/v2/"):
            return self._faulty("tpu", lambda: self._api_for_host(hostname, request))
        return self._faulty("metadata", lambda: metadata.answer(self.store, hostname, request))

    def _faulty(self, service: str, answer: Callable[[], HttpResponse]) -> HttpResponse:
        """Waits for the injected delay of `service`, one of faults.SERVICES; then uses up an injected error and returns
        it, or without one returns `answer()`."""
        with self.store.read() as state:
            delay = faults.delay(state, service)
            may_fail = any(fault.kind == "errors" and fault.service == service for fault in state.faults)
        time.sleep(delay)
        if may_fail:
            with self.store.change() as state:
                fault = faults.take(state, "errors", service)
            if fault is not None:
                unknown = ("UNKNOWN", f"injected fault: status {fault.status}")
                return _error(fault.status, *_INJECTED_ERRORS.get(fault.status, unknown))
        return answer()

    def _api_for_host(self, hostname: str, request: HttpRequest) -> HttpResponse:
        """Answers a host's call of the Cloud TPU API; the host must send the token of its own service account."""
        with self.store.read() as state:
            entry = state.find_host(hostname)
            token = None if entry is None else entry[1].token
        if token is None or request.headers.get("Authorization") != f"Bearer {token}":
            return _error(401, "UNAUTHENTICATED", "invalid authentication credentials")
        return self._api(request)

    # -- control

    def control(self, request: HttpRequest) -> HttpResponse:
        """Answers a request of control.py over the private socket: status, inject, stock, bucket or stop (0.1 s later).
        Other paths get 404, which serves as a ping; wrong arguments 400; a failed engine 500."""
        try:
            match (request.method, request.path):
                case ("GET", "/status"):
                    return json_response(self.status())
                case ("POST", "/inject"):
                    return json_response(self.inject(request.json()))
                case ("POST", "/stock"):
                    with self.store.change() as state:
                        state.stock, state.stock_since = request.json().get("stock"), time.time()
                    return json_response({})
                case ("POST", "/bucket"):
                    self.buckets.ensure(str(request.json()["name"]))
                    return json_response({})
                case ("POST", "/stop"):
                    threading.Timer(0.1, self.stopping.set).start()
                    return json_response({"pid": os.getpid()})
            return json_response({"error": f"no {request.path}"}, 404)
        except ValueError as error:
            return json_response({"error": str(error)}, 400)
        except (OSError, EngineError) as error:
            return json_response({"error": f"the engine failed: {error}"}, 500)

    def status(self) -> dict[str, Any]:
        """Returns nodes, hosts, containers, queued resources, pending operations, images, buckets and faults. Asks the
        engine; raises EngineError or OSError."""
        found = self.engine.containers(f"{LABEL}={self.hosts.emulator}")
        states = {container["Names"][0].removeprefix("/"): container["State"] for container in found}
        with self.store.read() as state:
            return {
                "id": state.id,
                "home": str(self.home),
                "pid": os.getpid(),
                "endpoint": f"http://127.0.0.1:{state.port}",
                "docker_host": f"unix://{self.sockets / ENGINE}",
                "subnet": state.subnet,
                "nodes": [_status_of(node, states) for node in state.nodes.values()],
                "queued_resources": [queued_resources.to_json(queued) for queued in state.queued.values()],
                "operations": [
                    tpu_api.operation_json(operation) for operation in state.operations.values() if not operation.done
                ],
                "pushed": {repository: dict(versions) for repository, versions in state.pushed.items()},
                "faults": [vars(fault).copy() for fault in state.faults],
                "buckets": self.buckets.summary(),
            }

    def inject(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Enters a fault of launcher/cli/emulator.py (`faults.enter` has its arguments), and stops, disconnects or
        restores its hosts. Returns "fault" with "node" and "hosts", those that it hit, or with "restored", those that
        "clear" brought back. Raises ValueError as `faults.enter`."""
        with self.store.change() as state:
            node, hosts = faults.enter(state, time.time(), **arguments)
        kind, restore = arguments["fault"], self.hosts.restore
        acts = {"cut-host": self.hosts.cut, "hang-host": self.hosts.hang, "restore-host": restore, "clear": restore}
        in_parallel(acts.get(kind, self.hosts.kill), hosts, at_once=len(hosts) or 1)
        names = [host.hostname for host in hosts]
        return {"fault": kind, **({"restored": names} if node is None else {"node": node.name, "hosts": names})}


def _status_of(node: Node, states: dict[str, str]) -> dict[str, Any]:
    """Returns a node's entry of `status`. `states`: of all containers of the emulator, by name."""
    hosts = []
    for host in node.hosts:
        prefix = f"{host.hostname}."
        hosts.append({
            "worker": host.index,
            **{name: getattr(host, name) for name in ("hostname", "address", *faults.FLAGS.values())},
            "state": states.get(host.hostname, "none"),
            "containers": {name.removeprefix(prefix): states[name] for name in states if name.startswith(prefix)},
        })  # fmt: skip
    accelerator_type = node.resource["acceleratorType"]
    return {"name": node.name, "state": node.state, "accelerator_type": accelerator_type, "hosts": hosts}


def open_listener(port: int) -> socket.socket:
    """Returns a socket that listens on `port` of 127.0.0.1, or on a free port if that is taken, or 0."""
    try:
        return socket.create_server(("127.0.0.1", port), backlog=512)
    except OSError:
        return socket.create_server(("127.0.0.1", 0), backlog=512)


def _error(status: int, name: str, text: str) -> HttpResponse:
    """Returns an error in the shape of Google's services."""
    return json_response({"error": {"code": status, "message": text, "status": name}}, status)


def main() -> None:
    """Runs the server that the arguments HOME, IMAGE (the hosts') and VOLUME (the virtual TPU's) name until a signal or
    a request stops it; locks HOME/lock. Ends the process if another server of HOME runs."""
    home, image, tpu_volume = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s")
    lock_file = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    if not lock(lock_file, home / "lock"):
        sys.exit("another server of this emulator is running")
    os.ftruncate(lock_file, 0)
    os.write(lock_file, str(os.getpid()).encode())  # control.py may have to kill this process
    server = Server(home, image, tpu_volume)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stopping.set())
    server.run()


if __name__ == "__main__":
    main()
