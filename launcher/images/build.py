"""Makes an image as far as needed: pulls its bases, builds it, pushes it.

A build that breaks off leaves no tag, a push no record, and the next call repeats it. Two processes that want the same
image take turns (a lock on its log).
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO

from launcher import shell
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import home
from launcher.images import artifact_registry, build_context, engine
from launcher.images.plan import ImagePlan, build_command, confirm_push, make_plan, record_push, refresh
from launcher.images.specification import ImageSpec, compute_tag

_BUILD_SECONDS = 3600.0
_PUSH_SECONDS = 3600.0
_PULL_SECONDS = 600.0

CODE_FOLDER = "/home/trainer"  # where the Dockerfiles of `images/` copy the folder of `image.code`
_BUILDKIT = {"DOCKER_BUILDKIT": "1"}

# Docker's words for a registry's refusal. In a build's output, "denied" may also come from a program of the build.
_REFUSED = r"denied|unauthorized|forbidden"
_REFUSED_IN_BUILD = (
    r"pull access denied|failed to (authorize|fetch (anonymous|oauth) token)|unexpected status.*\b40[13]\b|"
    r"failed to resolve source metadata.*(denied|unauthorized|forbidden)"
)


@dataclass(frozen=True)
class Image:
    """An image that hosts can run."""

    reference: str  # the name that hosts run
    code: Mapping[str, str] = field(default_factory=dict)  # build_context.hash_file of the files of `image.code`
    folder: str = CODE_FOLDER  # where these files are

    @property
    def digest(self) -> str:
        """The sha256:... in the name."""
        return self.reference.rpartition("@")[2]


def ensure_image(spec: ImageSpec, say: Callable[[str], None]) -> Image:
    """Returns the image after pulling its bases, building and pushing it as far as needed. When an image that was
    pushed before can't be pushed again, hosts get the earlier push, and `say` receives a line. Raises BadInput without
    an engine or a base image, LaunchError when the build or the push failed, with the last lines of docker's output and
    the path of all of it."""
    docker = engine.require_engine()
    plan = make_plan(spec)
    if plan.missing_bases:
        for base in plan.missing_bases:
            _pull(docker, base, say)
        plan = make_plan(spec)
    if not plan.image_id or (plan.remote and not confirm_push(plan, spec.ca_bundle)):
        with _open_log(plan.tag, say) as log:
            plan = refresh(plan)  # another process may have built it while we waited
            if not plan.image_id:
                _build(spec, plan, log, say)
                plan = refresh(plan)
            if plan.remote and plan.image_id and not confirm_push(plan, spec.ca_bundle):
                try:
                    if spec.create_repository and artifact_registry.require(plan.remote):
                        say(f"created the repository of {spec.repository}: private, as the project's")
                    _push(plan, plan.remote, plan.image_id, log, say)
                except LaunchError as error:
                    if plan.pushed is None:
                        raise
                    say(f"{str(error).splitlines()[0]}; it was pushed before, and hosts get that: {plan.pushed}")
            plan = refresh(plan)
    if not plan.reference:
        raise LaunchError(
            f"docker reported success, but its store has no {plan.remote or plan.local}: was it removed meanwhile? "
            "Try again"
        )
    hashes = spec.digest[1].items()
    code = {path.removeprefix("code/"): found for path, found in hashes if path.startswith("code/")}
    return Image(plan.reference, code)


def _pull(docker: str, base: str, say: Callable[[str], None]) -> None:
    """Pulls a base image. Raises BadInput with the last line of docker's output when that fails."""
    say(f"pulling {base}")
    result = shell.run([docker, "pull", "--quiet", base], timeout=_PULL_SECONDS)
    if not result.ok:
        lines = result.stderr.strip().splitlines() or ["no reason given"]
        raise BadInput(
            f"the base image {base} is not in the engine's store and can't be pulled: {lines[-1]}\n"
            "  let the engine reach a registry, or make the image (tools/base-image.sh of tpu-launch makes "
            "debian:bookworm-slim)"
        )


def _build(spec: ImageSpec, plan: ImagePlan, log: IO[str], say: Callable[[str], None]) -> None:
    """Builds from a temporary copy of the context. Raises BadInput if files changed while they were copied (the tag
    differs), LaunchError if the build fails."""
    folder = plan.work_folder
    shutil.rmtree(folder, ignore_errors=True)
    build_context.assemble(spec.context, folder / "context")
    shutil.copyfile(spec.dockerfile, folder / "Dockerfile")
    copied = replace(spec, context=build_context.tree(folder / "context"), dockerfile=folder / "Dockerfile")
    if compute_tag(copied, dict(plan.base_ids)) != plan.tag:
        raise BadInput(f"files of the image {spec.name} changed while they were copied: try again")
    say(f"building {plan.local}" + (f" (target {spec.target})" if spec.target else ""))
    begin = time.monotonic()
    failure = f"{plan.local} could not be built"
    try:
        command = build_command(spec, plan)
        _stream(command, log, show_steps(say), _BUILD_SECONDS, failure, Exit.BAD_INPUT, refused=_REFUSED_IN_BUILD)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"built {plan.local} in {time.monotonic() - begin:.0f} s")


def _push(plan: ImagePlan, remote: str, image_id: str, log: IO[str], say: Callable[[str], None]) -> None:
    """Tags and pushes the image, and records the push after docker has reported success. Raises LaunchError."""
    say(f"pushing {remote}")
    tag, push = [plan.docker, "tag", plan.local, remote], [plan.docker, "push", remote]
    _stream(tag, log, lambda line: None, engine.SECONDS, f"{remote} could not be tagged")
    digests: list[str] = []

    def keep_digest(line: str) -> None:
        if match := re.search(r"\bdigest: (sha256:[0-9a-f]{64})\b", line):
            digests.append(match[1])

    advice = artifact_registry.advice(remote)
    _stream(push, log, keep_digest, _PUSH_SECONDS, f"{remote} could not be pushed", missing_repository=advice)
    digests = digests or engine.find_digests(plan.docker, remote)
    if not digests:
        raise LaunchError(f"docker pushed {remote} without reporting a digest; its output: {log.name}")
    record_push(plan.tag, remote, image_id, digests[-1])


def _stream(
    argv: Sequence[str],
    log: IO[str],
    say: Callable[[str], None],
    seconds: float,
    failure: str,
    code: Exit = Exit.CLOUD_ERROR,
    *,
    missing_repository: str = "",
    refused: str = _REFUSED,
) -> None:
    """Runs a docker command; its lines go to the log and to `say`. If it fails, raises LaunchError with `failure`, the
    last lines and `code`; with PERMISSION instead if these lines match `refused` (the registry refuses the
    credentials), with BAD_INPUT and the advice `missing_repository` if that is given and the registry has no such
    repository."""
    lines: list[str] = []

    def keep(line: str) -> None:
        log.write(line + "\n")
        log.flush()
        if line.strip():
            lines.append(line)
        say(line)

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


def show_steps(say: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a filter for the lines of BuildKit's output: `say` receives a line for each step that is not cached."""
    # "#7 [a 2/4] RUN ..." announces a step; "#7 CACHED" may follow instead of the step's output.
    announced: dict[str, str] = {}

    def show(line: str) -> None:
        number, _, rest = line.partition(" ")
        if step := re.fullmatch(r"(\[[^\]]*\d+/\d+\]) (?!FROM )(.*)", rest):
            announced[number] = f"  {step[1]} {' '.join(step[2].split())[:100]}"
        elif rest.startswith("CACHED"):
            announced.pop(number, None)
        elif re.match(r"DONE|\d+\.\d+ ", rest) and number in announced:
            say(announced.pop(number))

    return show


@contextmanager
def _open_log(name: str, say: Callable[[str], None]) -> Iterator[IO[str]]:
    """Opens the log of a tag's builds and holds its lock during the block; waits for another process, and says so."""
    from launcher.file_lock import lock  # needs fcntl, which some systems that make images without an engine lack

    folder = home() / "images"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}.log"
    with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
        if not lock(log, path):
            say(f"waiting: another process builds the same image and holds {path}")
            lock(log, path, wait=True)
        yield log
