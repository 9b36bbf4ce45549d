"""Starts, stops and describes the emulator of a home directory, and returns the environment in which Google's tools
reach it.

What can fail half-way: a start or a server may be killed. `start` is idempotent and continues from the state file.
`stop` needs neither a server nor a state file: every container, volume and network has the emulator's id as a label,
and the id is a function of the home directory.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from launcher import shell
from launcher.emulator.api.stock import StockSection
from launcher.emulator.server import ACCESS_TOKEN, CONTROL, ENGINE
from launcher.emulator.state import EmulatorState, emulator_id, from_json, to_json
from launcher.emulator.tls import CA_FILE
from launcher.emulator.vm import virtual_tpu
from launcher.emulator.vm.engine_client import LABEL, Engine, EngineError
from launcher.emulator.vm.engine_images import remove_pulled
from launcher.emulator.vm.hosts import remove_all
from launcher.errors import BadInput, LaunchError
from launcher.home import ensure_private, hold_shared, is_held, lock, root, write_private
from launcher.images.build import ensure_image, make_plan
from launcher.images.specification import folder_spec
from launcher.installation import shared_folder
from training.yaml_file import ConfigError, load, refuse_unknown, validate

START_TIMEOUT = 30.0  # seconds until the server answers
PING_TIMEOUT = 5.0  # seconds after which a silent server counts as not running
STOP_TIMEOUT = 15.0  # seconds after which a server that does not end is killed
IMAGE = "tpu-launch/host"
SUBFOLDER = "emulated"  # of the launcher's home: state of emulated slices and runs, apart from that of Google's
_STARTED_BY_COMMAND = "started-by-a-command"  # a file in the home


def default_home() -> Path:
    """Returns $TPU_LAUNCH_HOME/emulator, or .tpu-launch/emulator in the current directory."""
    return root() / "emulator"


def start(home: Path, *, bucket: str | None = None, port: int | None = None, full_pushes: bool | None = None) -> None:
    """Starts the emulator of `home` unless it runs. Makes the hosts' image and the virtual TPU's volume if needed (this
    takes minutes), and the bucket named `bucket` unless it exists. `port` is on 127.0.0.1 (None: as before, or a free
    one); with `full_pushes` docker's pushes send bytes to the registry (None: as before).

    Raises:
        BadInput: no engine runs, the port is taken, the home or bucket name is bad, or it runs with another setting.
        LaunchError: the image can't be built, or the server does not start.
    """
    with _starting(home):
        state = _read(home)
        if state is None or not _answers(state):
            engine = _find_engine(state)
            image, tpu_volume = _make_images(engine)
            state = state or EmulatorState(emulator_id(home), 0, "", engine.path)
            if port is not None:
                _require_free(port)
                state.port = port
            if full_pushes is not None:
                state.full_pushes = full_pushes
            _launch(home, state, engine, image, tpu_volume)
            state = _running(home)
    for name, requested, actual in (("port", port, state.port), ("full-pushes", full_pushes, state.full_pushes)):
        if requested is not None and requested != actual:
            raise BadInput(
                f"the emulator of {home} already runs with {name} {actual}, not {requested}: "
                "`tpu-launch emulator stop` it first"
            )
    if bucket is not None:
        _ask(state, "POST", "/bucket", {"name": bucket})


def stop(home: Path, *, keep_data: bool = False) -> None:
    """Ends the server and removes containers, networks, volumes, names of pulled images, sockets and all files of the
    home, also after a crash, with a broken state file and when nothing runs. `keep_data` keeps the objects of its
    buckets. Raises LaunchError when the engine does not answer and may hold hosts, or can't remove them; BadInput
    without a readable state if DOCKER_HOST is another machine."""
    with _starting(home):
        try:
            state = _read(home)
        except BadInput:
            state = None
        sockets = Path(state.sockets) if state is not None and state.sockets else _socket_folder(home)
        _end_server(home, sockets)
        engine = Engine(state.engine if state is not None else _engine_path(None))
        try:
            remove_all(engine, f"{LABEL}={emulator_id(home)}")
            if state is not None and state.registry_port:
                remove_pulled(engine, state.registry_port)
        except OSError as error:
            if state is not None and state.nodes:
                raise LaunchError(
                    f"the container engine at {engine.path} does not answer ({error}), so emulated hosts may be left: "
                    "start it and stop the emulator again"
                ) from None
        except EngineError as error:
            raise LaunchError(f"removing the emulated hosts: {error}") from None
        shutil.rmtree(sockets, ignore_errors=True)
        for path in home.iterdir():
            if not keep_data or path.name != "buckets":
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for folder in (sockets.parent, home):
        with contextlib.suppress(OSError):
            folder.rmdir()  # when no other emulator uses it, or nothing is kept


def status(home: Path) -> dict[str, Any]:
    """Returns {"running": False, "home", "crashed"}, or "running": True and the server's `status`. Raises BadInput for
    a damaged state file, LaunchError when the server fails."""
    state = _read(home)
    if state is None or not _answers(state):
        return {"running": False, "home": str(home), "crashed": state is not None}
    return {"running": True, **_ask(state, "GET", "/status")}


def inject(home: Path, fault: dict[str, Any]) -> dict[str, Any]:
    """Makes the server inject {"fault": KIND, ...} (arguments: launcher/cli/emulator.py). Returns the kind, and as
    "hosts" or "restored" the hosts that it hit or brought back. Raises BadInput when the emulator does not run, or the
    target does not exist or is not READY."""
    return _ask(_running(home), "POST", "/inject", fault)


def enter_stock(home: Path, path: Path | None) -> None:
    """Makes the server use a file's stock, whose seconds count from now on; None: any number of every slice again.
    Raises BadInput for a wrong file, or when the emulator does not run."""
    content: dict[str, Any] | None = None
    if path is not None:
        try:
            document = load(path)
            refuse_unknown(document, StockSection.model_fields)
            content = validate(StockSection, document).model_dump()
        except ConfigError as error:
            raise BadInput(str(error)) from None
    _ask(_running(home), "POST", "/stock", {"stock": content})


def environment(home: Path) -> dict[str, str]:
    """Returns the variables with which gcloud, docker and storage clients reach the emulator instead of Google, HOME
    among them; sets none. Raises BadInput when it does not run."""
    state = _running(home)
    endpoint = f"http://127.0.0.1:{state.port}"
    user = home / "user"
    return {
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{endpoint}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{endpoint}/compute/v1/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_ARTIFACTREGISTRY": f"{endpoint}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{endpoint}/storage/v1/",
        "CLOUDSDK_CORE_ACCOUNT": "workstation@emulated.example",
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(home / ACCESS_TOKEN),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        # A search for a metadata server, telemetry and update checks would send requests to Google.
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_SURVEY_DISABLE_PROMPTS": "true",
        "NO_GCE_CHECK": "true",
        "CLOUDSDK_CONFIG": str(user / "gcloud"),
        "GOOGLE_APPLICATION_CREDENTIALS": "",
        "HOME": str(user),
        # HOME is gcloud's; docker keeps its own settings and plug-ins.
        "DOCKER_CONFIG": os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker"),
        "DOCKER_HOST": f"unix://{Path(state.sockets) / ENGINE}",
        "STORAGE_EMULATOR_HOST": state.storage,
        "TPU_LAUNCH_REGISTRY_ADDRESS": f"127.0.0.1:{state.registry_port}",
        "SSL_CERT_FILE": str(Path(state.sockets) / CA_FILE),
        "TPU_LAUNCH_SUBFOLDER": SUBFOLDER,
    }


# -- `--emulated`


@contextlib.contextmanager
def emulated(say: Callable[[str], None]) -> Iterator[None]:
    """Makes commands inside the block reach the emulator instead of Google, by variables of this process. Starts an
    emulator when none runs; the last of several commands, if then no slice or queued resource is left, stops it and
    keeps its buckets, to resume runs. Leaves one running that `tpu-launch emulator start` started, or that does not
    answer. `say` hears of start and stop."""
    home, users = default_home(), ensure_private(root() / SUBFOLDER) / "commands"
    mark = home / _STARTED_BY_COMMAND
    try:
        with hold_shared(users):
            if not status(home)["running"]:
                runs = root() / SUBFOLDER / "runs"
                say(f"starting the emulator (a first start builds its hosts' image); emulated runs are kept in {runs}")
                start(home)
                mark.touch()
            with shell.environment(environment(home)):
                yield
    finally:
        if mark.exists():
            with open(users, "a+") as file:  # a command that begins now waits for the stop
                report = status(home) if lock(file, users) else {}
                if report.get("running") and not report.get("nodes") and not report.get("queued_resources"):
                    stop(home, keep_data=True)
                    say("stopped the emulator: it has no slices left")


# -- starting


def _launch(home: Path, state: EmulatorState, engine: Engine, image: str, tpu_volume: str) -> None:
    """Writes the state, starts the server (log: HOME/server.log) and waits until it answers. Kills it and raises
    LaunchError when it does not within START_TIMEOUT, or ends; Ctrl-C kills it too. Raises BadInput as
    `_make_socket_folder`."""
    state.engine, state.sockets = engine.path, str(_make_socket_folder(home))
    write_private(home / "state.json", to_json(state))
    (home / "user" / "gcloud").mkdir(mode=0o700, parents=True, exist_ok=True)
    log = home / "server.log"
    source = str(Path(__file__).resolve().parents[2])  # imported from any working directory
    process = shell.spawn(
        [sys.executable, "-m", "launcher.emulator.server", str(home), image, tpu_volume],
        log=log,
        env={"PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    deadline = time.monotonic() + START_TIMEOUT
    try:
        while not _answers(state):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                failure = "ended at once" if ended else f"did not answer within {START_TIMEOUT:.0f} s"
                raise LaunchError(
                    f"the emulator's server {failure}: {''.join(last)} (all of it in {log}); "
                    "`tpu-launch emulator stop` clears everything"
                )
            time.sleep(0.03)
    except BaseException:  # Ctrl-C too: else the server would come up during a later command
        process.kill()
        raise


@contextlib.contextmanager
def _starting(home: Path) -> Iterator[None]:
    """Creates the home and holds its lock during the block: starts and stops of one home wait for each other, and say
    so on stderr, because a start may build images for minutes. Raises BadInput when the home can't be created."""
    while True:
        ensure_private(home)
        with open(home / "starting", "w+") as file:
            if not lock(file, home / "starting"):
                print("waiting for another start or stop of this emulator", file=sys.stderr)
                lock(file, home / "starting", wait=True)
            if os.fstat(file.fileno()).st_nlink:  # else a stop has removed the file, and others lock a new one
                yield
                return


def _require_free(port: int) -> None:
    """Raises BadInput unless the emulator can listen on this port of 127.0.0.1."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"port {port} of 127.0.0.1 can't be used for the emulator ({reason}): "
            "choose another --port, or leave it out"
        ) from None


def _find_engine(state: EmulatorState | None) -> Engine:
    """Returns the engine at `_engine_path`. Raises BadInput if it does not answer, or is on another machine."""
    engine = Engine(_engine_path(state))
    try:
        engine.call("GET", "/version", timeout=10)
    except (OSError, EngineError) as error:
        raise BadInput(
            f"no container engine answers at {engine.path} ({error}): start it (for example "
            "`sudo systemctl start docker`, or `sudo dockerd &`), or install one (Debian: apt-get install docker.io)"
        ) from None
    return engine


def _engine_path(state: EmulatorState | None) -> str:
    """Returns the engine's unix socket: DOCKER_HOST, unless that is an emulator's socket; else the state's; else
    docker's default. Raises BadInput for an engine on another machine."""
    host = os.environ.get("DOCKER_HOST", "")
    if host.startswith("unix://") and not host.endswith("/" + ENGINE):
        return host.removeprefix("unix://")
    if host and not host.startswith("unix://"):
        raise BadInput(f"DOCKER_HOST is {host}: an emulated slice needs an engine on this machine (a unix:// socket)")
    return state.engine if state is not None else "/var/run/docker.sock"


def _socket_folder(home: Path) -> Path:
    """Returns the folder of the home's sockets, below XDG_RUNTIME_DIR or else /tmp. Does not create it."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(base if base and os.path.isdir(base) else "/tmp") / f"tpu-launch-{os.getuid()}" / emulator_id(home)


def _make_socket_folder(home: Path) -> Path:
    """Creates a private folder with a short name, because a unix socket's path has at most 107 bytes. Raises BadInput
    when another user can enter it."""
    folder = _socket_folder(home)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise BadInput(
                f"{path} must be a folder that only you can enter; remove it, or set XDG_RUNTIME_DIR to a private "
                "folder"
            )
    return folder


def _make_images(engine: Engine) -> tuple[str, str]:
    """Returns the names of the hosts' image and of the virtual TPU's volume; makes what is missing, or whose sources
    changed, with the steps on stderr. Raises LaunchError when that fails, BadInput without a base image or a docker
    client."""
    images, say = shared_folder("images"), partial(print, file=sys.stderr)
    with shell.environment({"DOCKER_HOST": f"unix://{engine.path}"}):  # never an emulator's socket
        spec = folder_spec(IMAGE, images / "host")
        ensure_image(spec, say)
        return make_plan(spec).local, virtual_tpu.ensure_volume(images / "virtual-tpu", say)


# -- requests to the server


def _read(home: Path) -> EmulatorState | None:
    """Reads the state file; None when there is none. Raises BadInput when it is damaged."""
    try:
        return from_json((home / "state.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise BadInput(
            f"{home / 'state.json'}: {error}; "
            "`tpu-launch emulator stop` removes it with everything else of this emulator"
        ) from None


def _running(home: Path) -> EmulatorState:
    """Returns the state of an emulator that answers. Raises BadInput when none runs, or its state is damaged."""
    state = _read(home)
    if state is None or not _answers(state):
        crashed = " (its server crashed; a new start continues from its state)" if state is not None else ""
        raise BadInput(f"the emulator of {home} isn't running{crashed}: start it with `tpu-launch emulator start`")
    return state


def _answers(state: EmulatorState) -> bool:
    """Returns whether the emulator's server answers a ping, with any status, within PING_TIMEOUT."""
    try:
        _server(state.sockets).raw("GET", "/ping", timeout=PING_TIMEOUT)
    except OSError:
        return False
    return True


def _ask(state: EmulatorState, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sends a request to the server and returns its JSON. Raises BadInput for status 400, LaunchError for others from
    400 on and without an answer within 120 s."""
    try:
        status, data = _server(state.sockets).raw(method, path, body=body)
    except OSError as error:
        raise LaunchError(f"the emulator's server does not answer: {error}") from None
    value = dict(json.loads(data))
    if status == 400:
        raise BadInput(str(value["error"]))
    if status >= 400:
        raise LaunchError(f"the emulator: {value['error']}")
    return value


def _server(sockets: str | Path) -> Engine:
    """Returns a client of the server's control socket in this folder; an engine's client serves, as both speak HTTP."""
    return Engine(str(Path(sockets) / CONTROL))


def _end_server(home: Path, sockets: Path) -> None:
    """Asks the server to end and waits until it has, without limit; kills it every STOP_TIMEOUT seconds. The server
    holds a lock on the file with its process id, so no other process is killed. Does nothing if no server runs."""
    if is_held(home / "lock") is False:
        return
    with contextlib.suppress(OSError):
        _server(sockets).raw("POST", "/stop", timeout=PING_TIMEOUT)
    deadline = time.monotonic() + STOP_TIMEOUT
    while is_held(home / "lock"):
        if time.monotonic() > deadline:
            text = (home / "lock").read_text().strip()
            if text.isdigit():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(text), signal.SIGKILL)
            deadline = time.monotonic() + STOP_TIMEOUT
        time.sleep(0.02)
