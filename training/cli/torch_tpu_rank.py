"""One process of `tpu-train exec --runtime torch-tpu`: opens TorchTPU's device, then runs the user's program.

    python -m training.cli.torch_tpu_rank PROGRAM ARGUMENTS

`import torch` opens the device by itself only where torch_tpu finds the chips in /dev/vfio: neither on v4, whose driver
has /dev/accel*, nor on a virtual TPU. `_init_device` does what that import would do, and nothing when it has done it.
"""

from __future__ import annotations

import sys

from training.cli.user_program import run_script


def main(script: str, arguments: list[str]) -> None:
    """Runs a program as `python SCRIPT ARGUMENTS` would, with `tpu` as a device of torch."""
    import torch_tpu._loader

    torch_tpu._loader._init_device("tpu")
    run_script(script, arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
