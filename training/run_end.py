"""After the last step: compares the weights of all hosts, exports the model, writes the summary, and records the end of
the attempt on host 0: its last metrics, its end record, and report.html."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from training import storage as default_storage
from training.backends.protocol import Backend
from training.checkpoint.snapshot import in_batches
from training.checkpoint.tensors import key_in_part, whole
from training.errors import StopRequested, TrainError
from training.models import export
from training.models.hub import BackgroundUploader
from training.progress import Evaluations, Progress
from training.run_setup import Run
from training.storage import join
from training.telemetry import report
from training.telemetry.console import format_summary, warn
from training.telemetry.writer import MetricsWriter, join_thread


def compare_weights(run: Run, backend: Backend, replaced: int, seconds: float) -> tuple[str, int]:
    """Compares the hosts' weights; all hosts call it, and wait for each other at most `seconds`. Returns the weights'
    checksum, and how many rows of all hosts replaced damaged records (`replaced`: of this host). Raises TrainError if
    the weights differ, LostPeer, and StopRequested."""
    reports = run.rendezvous.meet("end", [weights_crc32c(backend, run.cluster.worker), replaced], seconds)
    checksums: dict[str, str] = {}
    for held in (held for held, _ in reports):
        if any(checksums.setdefault(key, checksum) != checksum for key, checksum in held.items()):
            by_host = ", ".join(" ".join(held.values()) if len(held) == 1 else str(held) for held, _ in reports)
            raise TrainError(
                f"the hosts ended with different weights (crc32c by host: {by_host}): they did not train the same model"
            )
    crc = int(google_crc32c.value(json.dumps(checksums, sort_keys=True).encode()))
    return checksums.get("", f"{crc:08x}"), sum(replaced for _, replaced in reports)


def weights_crc32c(backend: Backend, worker: int) -> dict[str, str]:
    """Returns checksums, 8 hexadecimal digits. If each host holds all weights: {"": that of all in the order of their
    names}. Else that of each slice that host `worker` holds, by tensor name and place (`key_in_part`)."""
    specs = {name: spec for name, spec in sorted(backend.tensor_specs().items()) if name.startswith(export.PREFIX)}
    split = {} if is_held_by_each_host(backend) else backend.state_slices()
    held = {name: [each.box for each in slices if worker in each.hosts] for name, slices in split.items()}
    sizes = {
        key_in_part(name, box, spec.shape): spec.cut(box).size
        for name, spec in specs.items()
        for box in held.get(name, [whole(spec.shape)])
    }
    checksums, crc = dict[str, str](), 0
    for keys in in_batches(sizes):
        tensors = {key: bytearray(sizes[key]) for key in keys}
        backend.snapshot_state({key: memoryview(data) for key, data in tensors.items()}).wait()
        for key, data in tensors.items():
            crc = int(google_crc32c.extend(crc, bytes(data)))
            checksums[key] = f"{google_crc32c.value(bytes(data)):08x}"
    return checksums if split else {"": f"{crc:08x}"}


def is_held_by_each_host(backend: Backend) -> bool:
    """Returns whether the devices of each host hold all of the state together."""
    slices = [slice_ for slices in backend.state_slices().values() for slice_ in slices]
    return len({slice_.hosts for slice_ in slices}) <= 1


def export_model(run: Run, backend: Backend, step: int | None) -> bool:
    """Exports on host 0, if export.at_end, while the other hosts wait for it; all hosts call it, after the last save.
    Returns whether a host was asked to stop by then.

    Writes the weights (with LoRA the adapter, unless lora.merge), config.json and the tokenizer to the run's model
    folder: from the checkpoint of `step`; None: as they are now, or from the last checkpoint if no host holds all of
    the weights. Raises BadInput if the checkpoint is damaged, StorageError, LostPeer and StopRequested."""
    if run.cluster.is_first and run.config.export.at_end:
        with run.timer.phase("export"):
            if step is not None or not is_held_by_each_host(backend):
                export.export_checkpoint(run.folder, run.model_folder, step)
            else:
                export.write_model_folder(
                    run.model_folder, backend.tensor_specs(), backend.snapshot_state, run.model_config(),
                    run.config.data.tokenizer, run.dependencies.storage, run.config,
                )  # fmt: skip
    size = sum(spec.size for name, spec in backend.tensor_specs().items() if name.startswith(export.PREFIX))
    seconds = run.config.rendezvous.start_seconds + default_storage.transfer_seconds(run.model_folder, size)
    return any(run.rendezvous.meet("exported", run.shutdown.requested, seconds))


def write_summary(run: Run, evaluations: Evaluations, summary: dict[str, Any]) -> None:
    """Writes summary.json, and a classifier's confusion matrix, and prints the summary. Call it on host 0 only. Raises
    StorageError."""
    if run.task.labels and (confusion := run.task.confusion(evaluations.counts)):
        report.write_confusion(run.folder, run.task.labels, confusion)
    run.dependencies.storage.write(
        join(run.folder, report.SUMMARY_FILE), json.dumps(summary, indent=1, allow_nan=False).encode() + b"\n"
    )
    run.console.print(format_summary(summary))
    run.console.print("summary: " + json.dumps(summary, allow_nan=False))


END_SECONDS = 90.0  # limit for recording an end, because storage may not answer


@dataclass
class Background:
    """An attempt's progress, and on host 0 its background work, once begun, which `record_attempt_end` ends."""

    progress: Progress = field(default_factory=Progress)
    log: MetricsWriter | None = None
    uploader: BackgroundUploader | None = None


@contextlib.contextmanager
def record_attempt_end(run: Run, background: Background) -> Iterator[None]:
    """Runs the block, a whole attempt on host 0, and records how it ended. Errors of the block are raised again; a
    failure to record is only a warning.

    In a thread, ends uploads, and writes the last metrics, the end record beside the attempt's record, and report.html
    in the run's folder. A stopped attempt skips report.html: the next attempt or `tpu-train report` writes it. This
    takes at most `END_SECONDS`, or HURRIED_SECONDS from a request to stop on; after an error also at most half of
    rendezvous.seconds, which the other hosts wait at a barrier, or they would report this host as lost instead."""
    limit = END_SECONDS
    error: BaseException | None = None
    storage, machine = run.dependencies.storage, run.dependencies.machine

    def record() -> None:
        """Ends background work and writes all records, in a thread. A failure is a warning."""
        try:
            if background.uploader:
                background.uploader.close()
            if background.log:
                failed = error is not None and not isinstance(error, StopRequested)
                background.log.finish(limit / 3, failed=failed, is_hurried=run.is_hurried)
            report.write_end(run.record_url, error, background.progress.step, run.timer.report(), storage=storage)
            if not isinstance(error, StopRequested):
                run.console.print(f"report: {report.write_report(run.folder, storage=storage)}")
        except Exception as problem:
            warn(f"the end of the attempt is not recorded in {run.folder}: {type(problem).__name__}: {problem}")

    try:
        yield
    except BaseException as raised:
        error, limit = raised, min(limit, run.config.rendezvous.seconds / 2)
        raise
    finally:
        run.console.close()
        recording = machine.threads.start(record, name="attempt-end")
        if not join_thread(recording, limit, run.is_hurried, machine.clock.monotonic):
            warn(f"the end of the attempt is not recorded in {run.folder}: storage is slow")
