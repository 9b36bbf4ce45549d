"""Makes an image, as far as that is needed: pulls its bases, builds it, pushes it.

Failure model: a build that breaks off leaves no tag behind, a push no record, and the next call does it again. Two
processes that want the same image take turns (a lock on its log).
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

from launcher import shell
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import home
from launcher.images import build_context, engine, pushed, registry, store
from launcher.images.plan import ImagePlan, build_command, make_plan, refresh
from launcher.images.specification import ImageSpec, compute_tag

_BUILD_SECONDS = 3600.0
_PUSH_SECONDS = 3600.0
_PULL_SECONDS = 600.0

_BUILDKIT = {"DOCKER_BUILDKIT": "1"}

# How docker words a registry's refusal. In a build's output a program of the build may be denied something, too.
_REFUSED = r"denied|unauthorized|forbidden"
_REFUSED_IN_BUILD = (
    r"pull access denied|failed to (authorize|fetch (anonymous|oauth) token)|unexpected status.*\b40[13]\b|"
    r"failed to resolve source metadata.*(denied|unauthorized|forbidden)"
)


@dataclass(frozen=True)
class Image:
    """An image that hosts can run."""

    reference: str
    """What hosts are given."""

    digest: str
    """The sha256:... in it."""


def ensure_image(spec: ImageSpec, on_line: Callable[[str], None]) -> Image:
    """The spec's image, pulled bases, built and pushed as far as needed.

    Args:
        spec: the image.
        on_line: is given a few lines to show. One of them is that an image which was pushed before could not be pushed
            again.

    Raises:
        BadInput: no engine, or no base image.
        LaunchError: the build or the push failed; has the last lines of docker's output and the path of all of it.
    """
    docker = engine.require_engine()
    plan = make_plan(spec)
    if plan.missing_bases:
        for base in plan.missing_bases:
            _pull(docker, base, on_line)
        plan = make_plan(spec)
    if not plan.image_id or plan.needs_push:
        with _open_log(plan.tag, on_line) as log:
            plan = refresh(plan)  # another process may have built it while we waited
            if not plan.image_id:
                _build(spec, plan, log, on_line)
                plan = refresh(plan)
            if plan.remote and plan.image_id and plan.needs_push:
                try:
                    if spec.create_repository and registry.require(plan.remote):
                        on_line(f"made the repository of {spec.repository}: private, as the project's")
                    _push(plan, plan.remote, plan.image_id, log, on_line)
                except LaunchError as error:
                    if plan.pushed is None:
                        raise
                    on_line(f"{str(error).splitlines()[0]}; it was pushed before, and hosts get that: {plan.pushed}")
            plan = refresh(plan)
    if not plan.reference:
        raise LaunchError(
            f"docker reported success, but its store has no {plan.remote or plan.local}: was it removed meanwhile? "
            "Try again"
        )
    return Image(plan.reference, plan.reference.rpartition("@")[2])


def _pull(docker: str, base: str, on_line: Callable[[str], None]) -> None:
    on_line(f"pulling {base}")
    result = shell.run([docker, "pull", "--quiet", base], timeout=_PULL_SECONDS)
    if not result.ok:
        lines = result.stderr.strip().splitlines() or ["no reason given"]
        raise BadInput(
            f"the base image {base} is not in the engine's store and can't be pulled: {lines[-1]}\n"
            "  let the engine reach a registry, or make the image (tools/base-image.sh of tpu-launch makes "
            "debian:bookworm-slim)"
        )


def _build(spec: ImageSpec, plan: ImagePlan, log: IO[str], on_line: Callable[[str], None]) -> None:
    folder = plan.work_folder
    shutil.rmtree(folder, ignore_errors=True)
    build_context.assemble(spec.context, folder / "context")
    shutil.copyfile(spec.dockerfile, folder / "Dockerfile")
    copied = replace(spec, context=build_context.tree(folder / "context"), dockerfile=folder / "Dockerfile")
    if compute_tag(copied, dict(plan.base_ids)) != plan.tag:
        raise BadInput(f"files of the image {spec.name} changed while they were copied: try again")
    on_line(f"building {plan.local}" + (f" (target {spec.target})" if spec.target else ""))
    begin = time.monotonic()
    failure = f"{plan.local} could not be built"
    try:
        _stream(
            build_command(spec, plan),
            log,
            show_steps(on_line),
            _BUILD_SECONDS,
            failure,
            Exit.BAD_INPUT,
            refused=_REFUSED_IN_BUILD,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    on_line(f"built {plan.local} in {time.monotonic() - begin:.0f} s")


def _push(plan: ImagePlan, remote: str, image_id: str, log: IO[str], on_line: Callable[[str], None]) -> None:
    """Pushes the image, and records it once docker has said that it is done."""
    on_line(f"pushing {remote}")
    tag, push = [plan.docker, "tag", plan.local, remote], [plan.docker, "push", remote]
    _stream(tag, log, _ignore, store.SECONDS, f"{remote} could not be tagged")
    digests: list[str] = []

    def keep_digest(line: str) -> None:
        if match := re.search(r"\bdigest: (sha256:[0-9a-f]{64})\b", line):
            digests.append(match[1])

    advice = registry.advice(remote)
    _stream(push, log, keep_digest, _PUSH_SECONDS, f"{remote} could not be pushed", missing_repository=advice)
    digests = digests or store.find_digests(plan.docker, remote)
    if not digests:
        raise LaunchError(f"docker pushed {remote} and did not say under which digest; all that it said: {log.name}")
    pushed.record(plan.tag, pushed.Push(remote, image_id, digests[-1], pushed.current_engine(), time.time()))


def _ignore(line: str) -> None:
    """Shows nothing of a line."""


def _stream(
    argv: Sequence[str],
    log: IO[str],
    on_line: Callable[[str], None],
    seconds: float,
    failure: str,
    code: Exit = Exit.CLOUD_ERROR,
    *,
    missing_repository: str = "",
    refused: str = _REFUSED,
) -> None:
    """Runs a docker command with its output in the log. Its failure is a LaunchError with the output's last lines.

    `missing_repository`: what to do when the registry has no such repository; `refused`: what in the last lines means
    that a registry refuses us.
    """
    lines: list[str] = []

    def keep(line: str) -> None:
        log.write(line + "\n")
        log.flush()
        if line.strip():
            lines.append(line)
        on_line(line)

    log.write(f"$ {shell.quote(argv)}\n")
    result = shell.stream(argv, keep, timeout=seconds, env=_BUILDKIT)
    if result.ok:
        return
    ending = " ".join(lines[-5:])
    if missing_repository and re.search(r"name unknown|Repository .*not found", ending, re.IGNORECASE):
        code, failure = Exit.BAD_INPUT, f"{failure}: {missing_repository}"
    elif re.search(refused, ending, re.IGNORECASE):
        code = Exit.PERMISSION
        failure += ": the registry refuses these credentials (gcloud auth configure-docker REGION-docker.pkg.dev)"
    shown = "\n".join(f"  {line}" for line in lines[-12:])
    raise LaunchError(
        f"{failure} (docker's exit code {result.returncode}); its last lines:\n{shown}\n  all of it: {log.name}",
        exit_code=code,
    )


def show_steps(on_line: Callable[[str], None]) -> Callable[[str], None]:
    """A filter for BuildKit's output: hands over one line for each step that really runs, `#7 [a 2/4] RUN ...` that no
    `#7 CACHED` follows."""
    announced: dict[str, str] = {}

    def show(line: str) -> None:
        number, _, rest = line.partition(" ")
        if step := re.fullmatch(r"(\[[^\]]*\d+/\d+\]) (?!FROM )(.*)", rest):
            announced[number] = f"  {step[1]} {' '.join(step[2].split())[:100]}"
        elif rest.startswith("CACHED"):
            announced.pop(number, None)
        elif re.match(r"DONE|\d+\.\d+ ", rest) and number in announced:
            on_line(announced.pop(number))

    return show


@contextmanager
def _open_log(name: str, on_line: Callable[[str], None]) -> Iterator[IO[str]]:
    """The log of one tag's builds, which is also the lock that keeps two processes from building it at once."""
    import fcntl  # not everywhere where images are made without an engine

    folder = home() / "images"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}.log"
    with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
        deadline = time.monotonic() + _BUILD_SECONDS
        reported = False
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not reported:
                    on_line("another process builds the same image; waiting for it")
                reported = True
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"another process has held {log.name} for {_BUILD_SECONDS:.0f} s: end it and try again"
                    ) from None
                time.sleep(0.5)
        yield log
