"""A click command that is imported when it is used, so that `--help` is quick whatever the commands import. `tpu-train`
and `tpu-launch` use it; it imports nothing but click.
"""

import importlib
from typing import Any

import click


class LazyCommand(click.Command):
    """Stands for a command of another module. Help, suggestions and completion read only its name and short help."""

    def __init__(self, name: str, target: str, short_help: str) -> None:
        """`target` is "package.module:attribute"."""
        super().__init__(name, short_help=short_help)
        self.target = target

    def load(self) -> click.Command:
        """Imports the command's module and returns the command."""
        module, _, attribute = self.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parses `args` for the loaded command; click then invokes that command, not this one."""
        return self.load().make_context(info_name, args, parent, **extra)
