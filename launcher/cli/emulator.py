"""The commands `emulator start|stop|status|stock|inject`, which need no Google Cloud."""

import json
import shlex
from pathlib import Path
from typing import Any

import click

from launcher.emulator import control, faults
from launcher.errors import BadInput


@click.group()
def emulator() -> None:
    """Stands in for Google: Cloud TPU, TPU VMs, Cloud Storage and the image registry, on this machine.

    The state is in .tpu-launch/emulator of the current directory, or of $TPU_LAUNCH_HOME.
    """


@emulator.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port on 127.0.0.1; without it the one of before, or a free one."
)
@click.option("--bucket", help="Create this bucket, unless it exists.")
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
def start(port: int | None, bucket: str | None, full_pushes: bool | None, environment: bool) -> None:
    """Start the emulator, or continue one that crashed, and print its address (with --environment, `export` lines). A
    first start builds the image of its hosts. If it runs already, another --port or kind of pushes is refused."""
    home = control.default_home()
    control.start(home, port=port, bucket=bucket, full_pushes=full_pushes)
    values = control.environment(home)
    if environment:
        for key, value in values.items():
            click.echo(f"export {key}={shlex.quote(value)}")
    else:
        click.echo(f"emulator of {home}: {values['CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU'].rstrip('/')}")


@emulator.command()
@click.option("--keep-data", is_flag=True, help="Keep the objects of its buckets for the next start.")
def stop(keep_data: bool) -> None:
    """Remove everything: emulated slices, what runs on them, networks, volumes, the server, its state."""
    control.stop(control.default_home(), keep_data=keep_data)


@emulator.command()
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON object with nodes, hosts, containers, pushed images, buckets and faults.",
)
def status(as_json: bool) -> None:
    """Show the emulated nodes, hosts, containers, queued resources, buckets and planned faults, or that it does not
    run."""
    report = control.status(control.default_home())
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    if not report["running"]:
        crashed = " (the server crashed; `tpu-launch emulator start` continues)" if report["crashed"] else ""
        click.echo(f"not running{crashed}")
        return
    place = f"network {report['subnet']}, home {report['home']}"
    click.echo(f"running at {report['endpoint']} (process {report['pid']}), {place}")
    for node in report["nodes"]:
        click.echo(f"{node['name']}  {node['accelerator_type']}  {node['state']}")
        for host in node["hosts"]:
            notes = "".join(f" {note}" for note in ("killed", "cut", "hung") if host[note])
            inside = ", ".join(f"{name} ({state})" for name, state in host["containers"].items()) or "no containers"
            place = f"{host['worker']}  {host['address']}  {host['hostname']}"
            click.echo(f"  host {place}  {host['state']}{notes}  {inside}")
    for queued in report["queued_resources"]:
        click.echo(f"{queued['name']}  {queued['state']['state']}")
    for name, bucket in report["buckets"].items():
        click.echo(f"gs://{name}  {bucket['objects']} objects, {bucket['bytes']} bytes")
    for fault in report["faults"]:
        click.echo("fault: " + " ".join(f"{key}={value}" for key, value in fault.items()))


@emulator.command()
@click.argument("path", metavar="[FILE]", type=click.Path(path_type=Path), required=False)
@click.option("--clear", is_flag=True, help="Any number of every slice again.")
def stock(path: Path | None, clear: bool) -> None:
    """Enter how many slices of each type there are in each zone, and when they come and go, from a YAML file; or end
    that with --clear. The emulator must run.

    Queued resources wait for the stock, and spot slices are taken when it falls. The guide's page on capacity shows a
    file.
    """
    if (path is None) == (not clear):
        raise BadInput("emulator stock: give a file, or --clear")
    control.enter_stock(control.default_home(), path)
    click.echo("stock: any number of every slice" if path is None else f"stock: as {path} says, from now on")


@emulator.group()
def inject() -> None:
    """Make something go wrong, once or until `clear`.

    Faults are kept with the emulator's state and survive a restart of it.
    """


def _add_fault(name: str, text: str, *parameters: click.Parameter, **fixed: Any) -> None:
    """Adds `emulator inject NAME`, whose help is `text`. Its parameters that are given, and `fixed`, are the fault's
    arguments; a parameter `kind` takes the place of NAME in the fault."""

    def run(as_json: bool, **given: Any) -> None:
        """Injects the fault, and prints its name and the hosts that it hits or brings back ("set" without any), or
        JSON. Raises BadInput if no emulator runs or the target is unknown or not READY."""
        arguments = {key: value for key, value in {**given, **fixed}.items() if value is not None}
        done = control.inject(control.default_home(), {"fault": arguments.pop("kind", name), **arguments})
        touched = ", ".join(done.get("hosts") or done.get("restored") or ["set"])
        click.echo(json.dumps(done) if as_json else f"{done['fault']}: {touched}")

    as_json = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")
    inject.add_command(click.Command(name, callback=run, params=[*parameters, as_json], help=text))


_SECONDS = click.FloatRange(0, min_open=True)
_NODE = click.Argument(["node"])
_WORKER = click.Argument(["worker"], type=int)
_NEXT = click.Argument(["left"], metavar="[COUNT]", type=click.IntRange(1), default=1)
_COUNT = click.Option(["--count", "left"], type=click.IntRange(1), help="How many times; without it until `clear`.")
_SERVICES, _STATUS = click.Choice(list(faults.SERVICES)), click.IntRange(400, 599)
_SERVICE = click.Option(
    ["--service"], type=_SERVICES, default="tpu", show_default=True, help="Which of the emulated services."
)
_FOR = click.Option(["--for", "seconds"], type=_SECONDS, help="Undone after so many seconds; else by restore-host.")

_add_fault("preempt", "Take NODE away: its state becomes PREEMPTED, its hosts die. Only deleting it is left.", _NODE)
for _name, _text in {
    "kill-host": "Kill host WORKER of NODE, with everything that runs on it. The API still shows the node as READY.",
    "cut-host": "Cut host WORKER of NODE off: no ssh, no peers, no metadata, no bucket. What runs there goes on.",
    "hang-host": "Stop every process of host WORKER of NODE: connections stay open, nothing answers.",
}.items():
    _add_fault(_name, _text, _NODE, _WORKER, _FOR)
_add_fault(
    "outage",
    "Take NODE's hosts down for some seconds, as REPAIRING or as a maintenance event; then they boot again.",
    click.Argument(["kind"], type=click.Choice(list(faults.OUTAGES))),
    _NODE,
    click.Option(
        ["--for", "seconds"], type=_SECONDS, default=10.0, show_default=True, help="Seconds until the hosts boot again."
    ),
)
_add_fault(
    "restore-host",
    "Undo kill-host, cut-host and hang-host: the host boots again, gets its network back, or goes on.",
    *(_NODE, _WORKER),
)
_add_fault("stockout", 'The next COUNT creations end with "There is no more capacity in the zone".', _NEXT)
_add_fault("quota", 'Creations are answered with 429 "Quota limit ... has been exceeded".', _COUNT)
_add_fault("permission", "Creations are answered with 403 \"Permission denied on 'locations/...'\".", _COUNT)
_add_fault(
    "object-user",
    "Every account has the role Storage Object User: objects as always, but 403 for a bucket itself.",
    service="storage",
)
_add_fault("busy", 'Creations, changes and deletions are answered with 409 "unable to queue the operation".', _COUNT)
_add_fault("stuck", "The operations of the next COUNT creations never end; deleting the node ends them.", _NEXT)
_add_fault(
    "registry",
    "The image registry is down: for all hosts, or only for host WORKER of NODE, which then lacks what it did not pull "
    "before.",
    click.Argument(["node"], required=False),
    click.Argument(["worker"], type=int, required=False),
)
_add_fault(
    "repository",
    "Repositories must have been created (`gcloud artifacts repositories create`) before an image is pushed to them.",
)
_add_fault(
    "disk-full",
    "The disk of host WORKER of NODE is full: its engine can't pull an image or make a container.",
    *(_NODE, _WORKER),
)
_add_fault(
    "errors",
    "Requests to a service fail with an HTTP status.",
    click.Option(["--status"], type=_STATUS, default=503, show_default=True, help="The HTTP status of the answers."),
    *(_SERVICE, _COUNT),
)
_add_fault(
    "slow",
    "Every request to a service waits so many seconds first.",
    click.Option(["--seconds"], type=_SECONDS, required=True, help="How long each request waits first."),
    _SERVICE,
)
_add_fault("clear", "End all faults: hosts that were killed or cut off come back; a preempted node stays preempted.")
