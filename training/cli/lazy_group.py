"""A click group whose commands are imported when they are used.

Help lists the commands from a table, so that it stays fast whatever the commands import. Both `tpu-train` and
`tpu-launch` use it; it imports nothing but click.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is defined, and what help says of it without importing it."""

    target: str  # "package.module:attribute"
    short_help: str


class LazyGroup(click.Group):
    """A group of commands of other modules, beside those that are attached to it directly."""

    def __init__(self, *arguments: Any, lazy_commands: Mapping[str, LazyCommand], **options: Any) -> None:
        """Makes a group; used as `@click.group(cls=LazyGroup, lazy_commands={...})`.

        Args:
            arguments: of click.Group.
            lazy_commands: the commands by name.
            options: of click.Group.
        """
        super().__init__(*arguments, **options)
        self.lazy_commands = dict(lazy_commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *self.lazy_commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported if need be; None when there is none."""
        lazy_command = self.lazy_commands.get(cmd_name)
        if lazy_command is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = lazy_command.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command of a command line. The error for an unknown one suggests similar names."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:  # click's own suggestions leave out the lazy commands
            names = self.list_commands(ctx)
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=names, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the section "Commands" of the help, without importing any."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names), default=0)
        rows = [(name, help_text) for name in names if (help_text := self._short_help(name, limit)) is not None]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes names of commands and of the group's own options, without importing any command."""
        items = [
            CompletionItem(name, help=help_text)
            for name in self.list_commands(ctx)
            if name.startswith(incomplete) and (help_text := self._short_help(name, 45)) is not None
        ]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def _short_help(self, name: str, limit: int) -> str | None:
        """None for a hidden command. `limit` is the most characters of a command that is attached directly."""
        if name in self.lazy_commands:
            return self.lazy_commands[name].short_help
        command = self.commands[name]
        return None if command.hidden else command.get_short_help_str(limit)
