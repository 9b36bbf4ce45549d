"""One process of `tpu-train exec --runtime torch-tpu`: opens TorchTPU's device, then runs the user's program.

python -m training.cli.torch_tpu_rank PROGRAM ARGUMENTS
"""

import sys

from training.backends.torch_tpu.internals import open_device
from training.cli.user_program import run_script


def main(script: str, arguments: list[str]) -> None:
    """Runs a program as `python SCRIPT ARGUMENTS` would, with `tpu` as a device of torch."""
    open_device()
    run_script(script, arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
