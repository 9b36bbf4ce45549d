"""The verbs that live in rooms of their own, and where: a room is opened when its verb is typed, or when help is asked for."""

from __future__ import annotations

import importlib

import click

_ROOMS = {
    "emulator": "launcher.emulator.commands:emulator",
    "rehearsal": "launcher.emulator.rehearsal:rehearsal",
    "init": "launcher.preparing:init",
    "doctor": "launcher.preparing:doctor",
    "preflight": "launcher.preflight:preflight",
    "list": "launcher.housekeeping:list_",
    "gc": "launcher.housekeeping:gc",
    "ssh": "launcher.reaching:ssh",
    "tunnel": "launcher.reaching:tunnel",
    "events": "launcher.looking:events",
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
