"""`tpu-launch completion`: the script that completes its commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from launcher.errors import BadInput

_VARIABLE = "_TPU_LAUNCH_COMPLETE"  # click's name for the program tpu-launch


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash    add to ~/.bashrc:     eval "$(tpu-launch completion bash)"
    zsh     add to ~/.zshrc:      eval "$(tpu-launch completion zsh)"
    fish    run once:             tpu-launch completion fish > ~/.config/fish/completions/tpu-launch.fish
    """
    complete = get_completion_class(shell)
    assert complete is not None
    try:
        click.echo(complete(context.find_root().command, {}, "tpu-launch", _VARIABLE).source())
    except RuntimeError as error:  # click asks bash for its version
        raise BadInput(f"completion for {shell}: {error}") from None
