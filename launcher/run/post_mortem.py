"""Keeps what explains a failed attempt: its last lines, and the post-mortem, one archive in the run's folder.

`.tpu-launch/runs/<run id>/post-mortem-<attempt>.tar.gz` (0600) is written before the attempt's containers are removed.
It holds the run's records, the attempt's logs and stack traces, the API's description of the slice, and for each host
that answers the inspection of its container, disks, memory, kernel messages and TPU logs. Values of the run's secrets
are masked, as far as this process knows them (`launcher.masking`).
"""

import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.masking import SecretMasker
from launcher.run import events
from launcher.run.ledger import Ledger
from launcher.run.logs import tail
from launcher.run.session import Session
from launcher.run.verdict import Verdict

_RECORDS = ("run.json", "config.yaml", "specification.yaml", "events.jsonl")
_LOG_BYTES = 20_000_000  # of the end of each log
# Of the host that is the first cause, in the report: lines, characters of each, and bytes in which they are found.
_LAST_LINES, _LAST_CHARACTERS, _LAST_BYTES = 8, 2_000, 2_000_000


def last_lines(ledger: Ledger, attempt: int, verdict: Verdict, masker: SecretMasker) -> tuple[str, ...]:
    """Returns the last 8 log lines of the host that is the first cause, as kept here, masked, each cut to its last
    2,000 characters; () without such a host or its log."""
    if verdict.cause is None or verdict.cause.worker < 0:
        return ()
    path = ledger.log_file(attempt, verdict.cause.worker)
    lines = tail(path, _LAST_BYTES)[-_LAST_LINES:] if path.exists() else []
    return tuple(masker.mask_text(line.text)[-_LAST_CHARACTERS:] for line in lines)


def keep_evidence(
    session: Session, attempt: int, reachable: Sequence[int], secrets: Mapping[str, str], unknown: Sequence[str]
) -> None:
    """Writes post-mortem-<attempt>.tar.gz into the run's folder, with what the `reachable` hosts give and `secrets`
    (values by name) masked, and records its path. Says the path and the names in `unknown`, of secrets that are not
    masked in it; or why the file can't be written."""
    say = session.context.output.say
    evidence = session.provider.evidence(session.container(attempt), reachable)
    try:
        path = write(session.ledger, attempt, evidence, secrets)
    except OSError as error:
        say(f"no post-mortem of attempt {attempt} could be written: {error}")
        return
    session.note(events.PostMortemWritten(attempt, str(path)))
    unmasked = f"; not masked in it: {', '.join(unknown)}" if unknown else ""
    say(f"logs, inspection, TPU logs and the slice's state are kept in {path}{unmasked}")


def write(ledger: Ledger, attempt: int, evidence: Mapping[str, str], secrets: Mapping[str, str]) -> Path:
    """Writes post-mortem-<attempt>.tar.gz into the run's folder and returns its path. `evidence` is file name -> text,
    from the provider; `secrets` are values to mask, by name. Raises OSError, and leaves no part, if that fails."""
    masker = SecretMasker(secrets)
    target = ledger.folder / f"post-mortem-{attempt}.tar.gz"
    now = int(ledger.clock.time())
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with (
            os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as sink,
            tarfile.open(fileobj=sink, mode="w:gz", compresslevel=3) as archive,
        ):
            for name, data in _contents(ledger, attempt, evidence, masker):
                entry = tarfile.TarInfo(f"{ledger.run_id}-{attempt}/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, now
                archive.addfile(entry, io.BytesIO(data))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _contents(
    ledger: Ledger, attempt: int, evidence: Mapping[str, str], masker: SecretMasker
) -> Iterator[tuple[str, bytes]]:
    """Yields names and masked contents: the ends (20 MB) of the run's records and of the attempt's logs and stack
    traces, as far as they exist, and the evidence."""
    paths = [ledger.folder / name for name in _RECORDS]
    for kind in ("logs", "stacks"):
        paths += sorted((ledger.folder / kind / f"attempt-{attempt}").glob("*"))
    for path in filter(Path.exists, paths):
        yield str(path.relative_to(ledger.folder)), _masked_end(path, masker)
    for name, text in evidence.items():
        yield name, masker.mask(text.encode(errors="replace"))


def _masked_end(path: Path, masker: SecretMasker) -> bytes:
    """Returns the end of a file (20 MB). Masks before it cuts, so that a secret that the cut divides is masked too."""
    with open(path, "rb") as file:
        start = max(0, path.stat().st_size - _LOG_BYTES - masker.longest)
        file.seek(start)
        data = masker.mask(file.read())
    return data[masker.longest :] if start else data
