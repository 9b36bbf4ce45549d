"""`tpu-train exec`: runs a PyTorch program of the user's own (training/distributed/user_program.py)."""

from __future__ import annotations

import click


@click.command(
    "exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=True
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def exec_script(script: str, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT, a PyTorch program of your own, as one process for each chip of this host.

    \b
    tpu-train exec train.py --output_dir out --max_steps 100

    On every host of a slice, as a run's command. Hugging Face's Trainer and Accelerate then train over all hosts. On
    CPU hosts: one process a host, gradients summed with gloo.
    """
    from training.distributed.user_program import run_on_host

    run_on_host(script, arguments)
