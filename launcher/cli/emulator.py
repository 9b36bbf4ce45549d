"""Commands that need no Google Cloud: `emulator start|stop|status|inject`, and `rehearsal`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from launcher import installation
from launcher import rehearsal as rehearsals
from launcher.cli import terminal
from launcher.emulator import control, faults
from launcher.errors import LaunchError


class _Reporting(click.Group):
    """A group whose errors are one message and an exit code, also when it is run on its own."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except LaunchError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(int(error.exit_code))


def _home() -> Path:
    return control.default_home()


@click.group(cls=_Reporting)
def emulator() -> None:
    """Stands in for Google: Cloud TPU, TPU VMs, Cloud Storage and the image registry, on this machine.

    The state is in .tpu-launch/emulator of the current directory, or of $TPU_LAUNCH_HOME.
    """


@emulator.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port on 127.0.0.1; without it the one of before, or a free one."
)
@click.option("--bucket", help="Make this bucket, when it doesn't exist.")
@click.option(
    "--create-seconds", type=click.FloatRange(0), help="How long the creation of a node takes at least (default 0.2)."
)
@click.option(
    "--plain-endpoints/--full-endpoints",
    default=None,
    help="The newer form of worker-network-endpoints: addresses only.",
)
@click.option(
    "--full-pushes/--named-pushes",
    default=None,
    help="docker's pushes send an image's bytes to the emulated registry; else only its name is entered.",
)
@click.option(
    "--environment",
    is_flag=True,
    help="Print `export` lines that point gcloud, docker and storage clients of this shell to it.",
)
def start(
    port: int | None,
    bucket: str | None,
    create_seconds: float | None,
    plain_endpoints: bool | None,
    full_pushes: bool | None,
    environment: bool,
) -> None:
    """Start the emulator, or continue one that crashed; does nothing when it runs."""
    home = _home()
    control.start(
        home,
        port=port,
        bucket=bucket,
        create_seconds=create_seconds,
        plain_endpoints=plain_endpoints,
        full_pushes=full_pushes,
    )
    values = control.environment(home)
    if environment:
        for key, value in values.items():
            click.echo(f"export {key}={value}")
    else:
        click.echo(f"emulator of {home}: {values['STORAGE_EMULATOR_HOST']}")


@emulator.command()
@click.option("--keep-data", is_flag=True, help="Keep the objects of its buckets for the next start.")
def stop(keep_data: bool) -> None:
    """Remove everything: emulated slices, what runs on them, networks, volumes, the server, its state."""
    control.stop(_home(), keep_data=keep_data)


@emulator.command()
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON object with nodes, hosts, containers, pushed images, buckets and faults.",
)
def status(as_json: bool) -> None:
    """Show what runs."""
    report = control.status(_home())
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    if not report["running"]:
        click.echo(
            "not running"
            + (" (the server crashed; `tpu-launch emulator start` continues)" if report["crashed"] else "")
        )
        return
    click.echo(
        f"running at {report['endpoint']} (process {report['pid']}), network {report['subnet']}, home {report['home']}"
    )
    for node in report["nodes"]:
        click.echo(f"{node['name']}  {node['accelerator_type']}  {node['state']}")
        for host in node["hosts"]:
            notes = "".join(f" {note}" for note in ("killed", "cut", "hung") if host[note])
            inside = ", ".join(f"{name} ({state})" for name, state in host["containers"].items()) or "no containers"
            click.echo(
                f"  host {host['worker']}  {host['address']}  {host['hostname']}  {host['state']}{notes}  {inside}"
            )
    for queued in report["queued_resources"]:
        click.echo(f"{queued['name']}  {queued['state']['state']}")
    for name, bucket in report["buckets"].items():
        click.echo(f"gs://{name}  {bucket['objects']} objects, {bucket['bytes']} bytes")
    for fault in report["faults"]:
        click.echo("fault: " + " ".join(f"{key}={value}" for key, value in fault.items()))


@emulator.group()
def inject() -> None:
    """Make something go wrong, once or until `clear`.

    Faults are kept with the emulator's state and survive a restart of it.
    """


def _inject(fault: str, as_json: bool, **arguments: Any) -> None:
    done = control.inject(_home(), {"fault": fault, **arguments})
    if as_json:
        click.echo(json.dumps(done))
    else:
        touched = done.get("hosts") or done.get("restored") or []
        click.echo(f"{fault}: {', '.join(touched) if touched else 'set'}")


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
count_option = click.option("--count", type=click.IntRange(1), help="How many times; without it until `clear`.")
service_option = click.option(
    "--service",
    type=click.Choice(["tpu", "storage", "metadata"]),
    default="tpu",
    show_default=True,
    help="Which of the emulated services.",
)
seconds_option = click.option(
    "--for",
    "seconds",
    type=click.FloatRange(0, min_open=True),
    help="Undone after so many seconds; else by restore-host.",
)


@inject.command()
@click.argument("node")
@click.option(
    "--shown-after",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds for which the API still shows the node as READY.",
)
@json_option
def preempt(node: str, shown_after: float, as_json: bool) -> None:
    """Take NODE away: its state becomes PREEMPTED, its hosts die. Only deleting it is left."""
    _inject("preempt", as_json, node=node, shown_after=shown_after)


@inject.command("kill-host")
@click.argument("node")
@click.argument("worker", type=int)
@seconds_option
@json_option
def kill_host(node: str, worker: int, seconds: float | None, as_json: bool) -> None:
    """Kill host WORKER of NODE, with everything that runs on it. The API still shows the node as READY."""
    _inject("kill-host", as_json, node=node, worker=worker, seconds=seconds)


@inject.command("cut-host")
@click.argument("node")
@click.argument("worker", type=int)
@seconds_option
@json_option
def cut_host(node: str, worker: int, seconds: float | None, as_json: bool) -> None:
    """Cut host WORKER of NODE off: no ssh, no peers, no metadata, no bucket. What runs there goes on."""
    _inject("cut-host", as_json, node=node, worker=worker, seconds=seconds)


@inject.command("hang-host")
@click.argument("node")
@click.argument("worker", type=int)
@seconds_option
@json_option
def hang_host(node: str, worker: int, seconds: float | None, as_json: bool) -> None:
    """Stop every process of host WORKER of NODE: connections stay open, nothing answers."""
    _inject("hang-host", as_json, node=node, worker=worker, seconds=seconds)


@inject.command("outage")
@click.argument("kind", type=click.Choice(["repair", "maintenance"]))
@click.argument("node")
@click.option(
    "--for",
    "seconds",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds until the hosts boot again.",
)
@json_option
def outage(kind: str, node: str, seconds: float, as_json: bool) -> None:
    """Take NODE's hosts down for some seconds, as REPAIRING or as a maintenance event; then they boot again."""
    _inject(kind, as_json, node=node, seconds=seconds)


@inject.command("restore-host")
@click.argument("node")
@click.argument("worker", type=int)
@json_option
def restore_host(node: str, worker: int, as_json: bool) -> None:
    """Undo kill-host, cut-host and hang-host: the host boots again, gets its network back, or goes on."""
    _inject("restore-host", as_json, node=node, worker=worker)


@inject.command()
@click.argument("count", type=click.IntRange(1), default=1)
@click.option(
    "--wording",
    type=click.Choice(list(faults.STOCKOUTS)),
    default="capacity",
    show_default=True,
    help='How Google says it: "no more capacity", code 13 "an internal error", "not enough resources".',
)
@json_option
def stockout(count: int, wording: str, as_json: bool) -> None:
    """The next COUNT creations end with "There is no more capacity in the zone"."""
    _inject("stockout", as_json, left=count, wording=wording)


@inject.command()
@count_option
@json_option
def quota(count: int | None, as_json: bool) -> None:
    """Creations are answered with 429 "Quota limit ... has been exceeded"."""
    _inject("quota", as_json, left=count)


@inject.command()
@count_option
@json_option
def permission(count: int | None, as_json: bool) -> None:
    """Creations are answered with 403 "Permission denied on 'locations/...'"."""
    _inject("permission", as_json, left=count)


@inject.command("object-user")
@json_option
def object_user(as_json: bool) -> None:
    """Everybody has the role Storage Object User: objects as always, but 403 for a bucket itself."""
    _inject("object-user", as_json, service="storage")


@inject.command()
@count_option
@json_option
def busy(count: int | None, as_json: bool) -> None:
    """Creations, changes and deletions are answered with 409 "unable to queue the operation"."""
    _inject("busy", as_json, left=count)


@inject.command()
@click.argument("count", type=click.IntRange(1), default=1)
@json_option
def stuck(count: int, as_json: bool) -> None:
    """The operations of the next COUNT creations never end; deleting the node ends them."""
    _inject("stuck", as_json, left=count)


@inject.command()
@click.argument("count", type=click.IntRange(1), default=1)
@json_option
def lost(count: int, as_json: bool) -> None:
    """The next COUNT creations, changes and deletions are done, and answered with 503: gcloud asks again."""
    _inject("lost", as_json, left=count)


@inject.command("slow-deletion")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), required=True, help="How long a node is DELETING at least."
)
@json_option
def slow_deletion(seconds: float, as_json: bool) -> None:
    """Deletions take so many seconds, until `clear`."""
    _inject("slow-deletion", as_json, seconds=seconds)


def _of_host(node: str | None, worker: int | None) -> dict[str, Any]:
    return {} if node is None else {"node": node, "worker": worker or 0}


@inject.command()
@click.argument("node", required=False)
@click.argument("worker", type=int, required=False)
@json_option
def registry(node: str | None, worker: int | None, as_json: bool) -> None:
    """The image registry is down: for everybody, or only for host WORKER of NODE, which then lacks what it did not pull
    before."""
    _inject("registry", as_json, **_of_host(node, worker))


@inject.command()
@json_option
def repository(as_json: bool) -> None:
    """Repositories must have been made (`gcloud artifacts repositories create`) before an image is pushed to them."""
    _inject("repository", as_json)


@inject.command("disk-full")
@click.argument("node")
@click.argument("worker", type=int)
@json_option
def disk_full(node: str, worker: int, as_json: bool) -> None:
    """The disk of host WORKER of NODE is full: its engine can't pull an image or make a container."""
    _inject("disk-full", as_json, **_of_host(node, worker))


@inject.command()
@click.option(
    "--status", type=click.IntRange(400, 599), default=503, show_default=True, help="The HTTP status of the answers."
)
@click.option(
    "--rate",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="The share of requests that fail.",
)
@service_option
@count_option
@json_option
def errors(status: int, rate: float, service: str, count: int | None, as_json: bool) -> None:
    """Requests to a service fail with an HTTP status."""
    _inject("errors", as_json, status=status, rate=rate, service=service, left=count)


@inject.command()
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), required=True, help="How long each request waits first."
)
@service_option
@json_option
def slow(seconds: float, service: str, as_json: bool) -> None:
    """Every request to a service waits so many seconds first."""
    _inject("slow", as_json, seconds=seconds, service=service)


@inject.command()
@json_option
def clear(as_json: bool) -> None:
    """End all faults: hosts that were killed or cut off come back; a preempted node stays preempted."""
    _inject("clear", as_json)


@click.command()
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="The run's YAML file.  [default: examples/rehearsal.yaml, which is installed with tpu-launch]",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the file: --set slice.accelerator_type=v4-32.",
)
def rehearsal(path: Path | None, overrides: tuple[str, ...]) -> None:
    """Rehearse a whole run on an emulated slice of this machine: up, prepare data, train, down."""
    screen = rehearsals.Screen(
        terminal.say,
        lambda command: terminal.say(click.style(f"$ {command}", bold=True)),
        lambda line: click.echo(f"         {line}", err=True),
    )
    summary = rehearsals.rehearse(path or installation.example("rehearsal.yaml"), overrides, screen)
    click.echo("")
    for line in rehearsals.lines(summary):
        click.echo(line)


if __name__ == "__main__":
    emulator()
