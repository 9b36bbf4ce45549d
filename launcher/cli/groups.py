"""The verbs that live in rooms of their own, and where: a room is opened when its verb is typed, or when help is asked
for."""

from __future__ import annotations

import importlib

import click

_ROOMS = {
    "emulator": "launcher.cli.emulator:emulator",
    "rehearsal": "launcher.cli.rehearsal:rehearsal",
    "init": "launcher.cli.setup:init",
    "doctor": "launcher.cli.setup:doctor",
    "preflight": "launcher.cli.preflight:preflight",
    "list": "launcher.cli.slices:list_",
    "gc": "launcher.cli.slices:gc",
    "ssh": "launcher.cli.ssh:ssh",
    "tunnel": "launcher.cli.ssh:tunnel",
    "events": "launcher.cli.events:events",
    "completion": "launcher.cli.completion:completion",
}


class Verbs(click.Group):
    """`tpu-launch` with all its verbs."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *_ROOMS})

    def get_command(self, context: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ROOMS:
            return super().get_command(context, cmd_name)
        module, _, name = _ROOMS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command
