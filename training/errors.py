"""The errors that end a training process, and the exit codes that tell the launcher which one it was.

Framework-free. `cli.main` turns every `TrainError` into one message on standard error and its exit code; a traceback
means a bug.
"""

import enum


class Exit(enum.IntEnum):
    """Exit codes of `tpu-train`, the launcher's only basis for decisions. docs/reference/exit-codes.md is generated
    from the texts below the members."""

    FINISHED = 0
    """Finished."""
    FAILED = 1
    """A failure, like every code that is not in this table."""
    BAD_INPUT = 2
    """Bad configuration or data: a retry changes nothing."""
    DOES_NOT_FIT = 3
    """From `preflight`: a program does not fit into the accelerator's memory, or does not compile for it."""
    SAVED = 75
    """Asked to stop, and a checkpoint is committed: resume. (EX_TEMPFAIL of sysexits.h)"""
    LOST_PEER = 76
    """Lost another host: a symptom, never the first cause."""


class TrainError(Exception):
    """An error that a user can act on. Its message says what happened, where, and what to do."""

    exit_code: Exit = Exit.FAILED
    heading = "error: "  # before the message, on standard error


class BadInput(TrainError):
    """Configuration or data is wrong; a retry changes nothing."""

    exit_code = Exit.BAD_INPUT


class LostPeer(TrainError):
    """Another host did not arrive at a barrier, or its connection broke; the message names it and its last phase."""

    exit_code = Exit.LOST_PEER
    heading = "lost peer: "


class OutOfMemory(TrainError):
    """The memory of a device, or of the host, is too small for the run."""

    ADVICE = "lower train.global_batch_size, raise train.gradient_accumulation, or take precision: bf16"

    def __init__(self, details: str) -> None:
        """`details`: the framework's message."""
        super().__init__(f"out of memory: {self.ADVICE}\n  {details}")


class NonFinite(TrainError):
    """The loss, the gradient norm or the state of a run is NaN or infinite. All hosts raise it for the same step."""

    def __init__(self, step: int, message: str) -> None:
        """`step`: the step with the first such value, counted from 0."""
        super().__init__(message)
        self.step = step


class UnusableTpu(TrainError):
    """The framework could not initialise the TPU."""

    def __init__(self, framework_error: str, accelerator_type: str | None, host: str = "this host") -> None:
        """`framework_error`: the framework's message, whose last line says why. `host`: the host of the TPU."""
        lines = framework_error.strip().splitlines() or ["no reason given"]
        super().__init__(
            f"the TPU of {host} could not be initialised: {lines[-1].strip().rstrip('.')}; check that it is one of a "
            f"{accelerator_type or 'TPU'} (TPU_ACCELERATOR_TYPE), that the container sees its chips (/dev/accel* or "
            "/dev/vfio/*), that it runs as root (run.user left out), and that no other process holds them"
        )


class StopRequested(TrainError):
    """This host or another one was asked to stop (SIGTERM). The run goes on from its last commit."""

    exit_code = Exit.SAVED
    heading = "stopped: "


# Messages of the frameworks when memory is short: XLA on TPU and GPU, XLA on the CPU, torch on the CPU.
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "can't allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether `error` is a MemoryError, or a framework's message about the memory of a device or the host."""
    return isinstance(error, MemoryError) or any(message in str(error) for message in _OUT_OF_MEMORY)
