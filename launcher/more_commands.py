"""The verbs beside up, run and down: one list, so that `cli.main` adds them with one line."""

from __future__ import annotations

import click

from launcher.housekeeping import gc, list_
from launcher.looking import events
from launcher.preflight import preflight
from launcher.preparing import doctor, init
from launcher.reaching import ssh, tunnel

COMMANDS: tuple[click.Command, ...] = (init, doctor, preflight, list_, gc, ssh, tunnel, events)
