"""Options that all commands of `tpu-launch` share, and what is made from them: the configuration, the provider, and
with `--emulated` the emulator's endpoints."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from launcher.cli import terminal
from launcher.config import Config, load
from launcher.errors import BadInput
from launcher.home import home
from launcher.provider import Provider
from launcher.providers import DEFAULT, PROVIDERS, make_provider, this_machine
from launcher.workstation import Workstation
from training.storage import is_remote

if TYPE_CHECKING:  # only the commands on a run need it, and it takes time to import
    from launcher.run.session import Context

DEFAULT_FILE = Path("tpu-launch.yaml")
PORT = click.IntRange(1, 65535)
# Commands that work with any provider; the others need a Cloud TPU node.
_ANY_PROVIDER = ("up", "run", "status", "top", "logs", "events", "explain", "stop", "down", "manifest")
# What users of a cluster use instead of the others.
_ON_A_CLUSTER = {
    "notebook": "`kubectl exec POD -- jupyter notebook` and `kubectl port-forward POD 8888` are a cluster's way",
    "plan": "`tpu-launch manifest` prints what `run` applies",
}

Function = TypeVar("Function", bound=Callable[..., Any])


_emulated_option = click.option(
    "--emulated", is_flag=True, help="Use the emulated slice of this machine instead of Google Cloud."
)
_provider_option = click.option(
    "--provider", type=click.Choice(list(PROVIDERS)), default=DEFAULT, help="Where the hosts are."
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Print the commands, as `plan` does, and do nothing.")
run_option = click.option(
    "--run",
    "run_id",
    metavar="RUN",
    help="This run instead of the newest of the slice: its id, or gs://bucket/runs/ID.",
)


def set_option(example: str) -> Callable[[Function], Function]:
    """Returns the decorator that adds --set KEY=VALUE, for changes of the file; a command gets all as `overrides`."""
    text = f"Change a key of the file: --set {example}."
    return click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=text)


def configured(function: Function, *, file_flags: tuple[str, ...] = ("-f", "--file")) -> Function:
    """Returns the command with -f, --set, --provider and --emulated. It loads the file (an argument `named` stands for
    -f, a `command` replaces the file's) and calls `function` with the configuration and the other options; for a
    `folder` of runs with None, without a file. A run gs://bucket/runs/ID, in place of the file or by --run, is copied
    here; `function` gets its configuration, and its id as `run_id`. With --emulated, `function` reaches the emulator.
    Raises BadInput for a missing or wrong file, or a command that the provider lacks. `file_flags` name the file."""

    def wrapped(
        context: click.Context, /, path: str, overrides: tuple[str, ...], provider: str, emulated: bool, **options: Any
    ) -> Any:
        path, command = options.pop("named", None) or path, function.__name__.rstrip("_")
        emulated = emulated or bool(context.find_root().obj)
        needs_file = not options.get("folder")  # of runs
        url = next((name for name in (options.get("run_id"), path) if name and is_remote(name)), None)
        config: Config | None = None
        if needs_file and url is None:
            if not os.path.exists(path):
                raise BadInput(
                    f"{path}: no such file: name the run's YAML file with {file_flags[0]}, "
                    "or write a first one with `tpu-launch init`"
                )
            _require_support(command, provider, emulated)
            config = replace(load(Path(path), overrides, command=options.get("command", ())), provider=provider)
            config = _fix_context(config, command)
        with emulation(emulated):
            if needs_file and url is not None:
                if options.get("command") and command in ("run", "plan", "manifest"):
                    raise BadInput(f"{url} has the command with which it was started: leave out what follows --")
                config, run_id = _import(url, overrides)
                _require_support(command, config.provider, emulated)
                options |= {"run_id": run_id} if "run_id" in options else {}
            return function(config, **options)

    functools.update_wrapper(wrapped, function)
    run_file = click.option(
        *file_flags, "path", type=click.Path(), default=str(DEFAULT_FILE), metavar="FILE",
        help="The run's YAML file, or gs://bucket/runs/ID.",
    )  # fmt: skip
    decorated: Any = click.pass_context(wrapped)
    for option in (_emulated_option, _provider_option, set_option("train.steps=100"), run_file):
        decorated = option(decorated)
    return cast(Function, decorated)


def _fix_context(config: Config, command: str) -> Config:
    """Returns the configuration with a kubectl context in gke.context where a command uses a cluster and the file names
    none, so that `kubectl config use-context` moves no run: that of the slice's newest run, for `up` and `run` if it is
    open, else the current one. `run` keeps it in the run's specification."""
    if config.provider != "gke" or config.gke.context or command not in ("up", "run", "status", "top", "down"):
        return config
    from launcher.run import session, specification

    context: str | None = None
    for ledger in session.runs_on_slice(config, home(), machine())[-1:]:
        with contextlib.suppress(BadInput):  # a damaged run must not keep a slice
            if ledger.state.phase.is_open or command not in ("up", "run"):
                context = specification.read(ledger.folder).config().gke.context
    context = context or machine().run(["kubectl", "config", "current-context"], timeout=20.0).stdout.strip() or None
    sections = {**config.document.value, "gke": {**(config.document.value.get("gke") or {}), "context": context}}
    gke = config.gke.model_copy(update={"context": context})
    return replace(config, document=replace(config.document, value=sections), gke=gke)


def _import(url: str, overrides: tuple[str, ...]) -> tuple[Config, str]:
    """Copies a run of a bucket into the launcher's folder; returns configuration and id. If the run's slice has
    candidates, later requests for it are recorded in the run's bucket too, unless this machine has records of its own.
    Raises BadInput, also for any `overrides`, LaunchError or OSError."""
    from launcher.run import specification
    from launcher.run.session import import_run
    from launcher.tpu_vm.requests import RequestRecord

    if overrides:
        raise BadInput(f"--set changes keys of a file; {url} has the configuration with which it was started")
    ledger = import_run(home(), machine(), url)
    config = specification.read(ledger.folder).config()
    if ledger.bucket is not None and config.slice.candidates and config.provider == DEFAULT:
        RequestRecord(config).adopt(ledger.bucket.requests)
    return config, ledger.run_id


@contextlib.contextmanager
def emulation(emulated: bool) -> Iterator[None]:
    """With `emulated`, points this process to an emulator in the block, by environment variables: starts one unless it
    runs; afterwards, if no slice is left and no other command uses it, stops one that a block started and keeps its
    buckets."""
    if not emulated:
        yield
        return
    from launcher.emulator import control

    with control.emulated(terminal.say):
        yield


def file_option(help: str, default: Path | None = None) -> Callable[[Function], Function]:
    """Returns the decorator that adds -f FILE, with `help` and `default`, to a command, which gets it as `path`: None
    without both. Does not look whether the file exists."""
    return click.option("-f", "--file", "path", type=click.Path(path_type=Path), default=default, help=help)


def _require_support(command: str, provider: str, emulated: bool) -> None:
    """Raises BadInput if the provider does not support the command, or, with `emulated`, --emulated."""
    refused_later = ("exec", "profile")  # with the kubectl command for the run's pod
    if not PROVIDERS[provider].cloud_tpu_node and command not in (*_ANY_PROVIDER, *refused_later):
        instead = f"; {_ON_A_CLUSTER[command]}" if command in _ON_A_CLUSTER else ""
        raise BadInput(
            f"tpu-launch {command} is for TPU VMs; with --provider {provider} there are "
            f"{', '.join(_ANY_PROVIDER)}{instead}"
        )
    if emulated and not PROVIDERS[provider].cloud_tpu_node:
        raise BadInput("--emulated is a slice of TPU VMs; a cluster is not emulated")


@functools.cache
def machine() -> Workstation:
    """Returns this process's workstation, made at the first call."""
    return this_machine()


def open_provider(config: Config) -> Provider:
    """Returns a new provider, which prints its lines here and which the caller closes. Raises as `make_provider`."""
    return make_provider(config, terminal.say, machine())


def run_context() -> Context:
    """Returns the context of this process for commands on a run; creates the launcher's folder if missing."""
    from launcher.run.session import Context, Output

    return Context(home(), os.environ, open_provider, Output(terminal.say, terminal.host_line), machine())


def show_plan(config: Config, command: str) -> None:
    """Prints those commands of `plan` that belong to `command` (up, run, down), for `--dry-run`. Raises BadInput for a
    provider without a plan."""
    from launcher.plan import list_commands

    _require_support("plan", config.provider, emulated=False)
    for step in list_commands(config):
        if step.verb == command:
            click.echo(step.text())
