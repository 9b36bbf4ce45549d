"""`tpu-launch doctor`: shows what a run needs and lacks."""

import sys

import click

from launcher.checks import doctor as doctors
from launcher.cli import terminal
from launcher.cli.options import configured, run_context
from launcher.config import Config
from launcher.errors import Exit
from launcher.findings import Finding, any_fatal

_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


@click.command()
@click.option(
    "--devices",
    is_flag=True,
    help="Check the devices of all hosts of the slice instead, in the image; 16 if a check fails.",
)
@click.option("--json", "as_json", is_flag=True, help="The rows as JSON.")
@configured
def doctor(config: Config, devices: bool, as_json: bool) -> None:
    """Check everything that a run needs, and print the command that fixes what is missing. Changes nothing; exits with
    0 or 2.

    With --devices every host of a READY slice runs `tpu-train check-devices` once, in a container that is removed: the
    number of devices, their memory, a bfloat16 matrix product, a sum over all devices of the slice, the hosts' clocks
    and disks, the speed of the output bucket. Exits with 0, 16, or 23 if a run is on the slice.
    """
    if devices:
        show_devices(config, as_json)
        return
    findings = doctors.examine(config)
    if as_json:
        terminal.dump(
            [
                {"check": each.where, "verdict": each.severity.value, "detail": each.message, "fix": each.fix}
                for each in findings
            ]
        )
    else:
        for finding in findings:
            word = finding.severity.value
            _print(finding, f"{click.style(word, fg=_COLOURS[word])}  ")
    if any_fatal(findings):
        sys.exit(Exit.BAD_INPUT)


def _print(finding: Finding, before: str = "") -> None:
    """Prints a finding after the text `before`, and its fix, if any, on a line of its own."""
    click.echo(f"{before}{finding.where}: {terminal.printable(finding.message)}")
    if finding.fix:
        click.echo(f"      fix: {finding.fix}")


def show_devices(config: Config, as_json: bool = False) -> None:
    """Checks devices in a container on each host, and prints a row a host; exits with Exit.DEVICES if a check fails."""
    from launcher.device_check import COLUMNS, check_devices

    results = check_devices(config, run_context())
    if as_json:
        terminal.dump([result.as_json() for result in results])
    else:
        terminal.table(COLUMNS, [result.row() for result in results])
        for result in results:
            for finding in result.findings:
                _print(finding)
    if not all(result.ok for result in results):
        sys.exit(Exit.DEVICES)
