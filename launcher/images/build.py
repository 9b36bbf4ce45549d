"""Makes an image as far as needed: pulls its bases, and unless the registry has its tag, builds it (if the engine's
store lacks it) and pushes it. With a repository, hosts run `repository@sha256:...`; without one (an emulated slice),
the local image id.

A build that breaks off leaves no tag in the store, a push none in the registry, and the next call repeats it. Two
processes that want the same image take turns (a lock on its log).

An image is also pushed when the registry does not answer this process: pushing again is cheap, because a registry that
has the image takes only the manifest. The digest of the last push that docker reported as done is recorded beside the
build logs, until the registry says it is gone; hosts get it when the next push fails. The engine's report
(`RepoDigests`) is no proof: with the containerd image store, it has a digest from `docker tag` on, before any push.
"""

import contextlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from launcher import shell
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import home, lock, where, write_private
from launcher.images import build_context, engine
from launcher.images.registry import Registry
from launcher.images.repositories import (
    advise_creation,
    find_credentials,
    parse_reference,
    parse_repository,
    require_repository,
)
from launcher.images.specification import ImageSpec, base_images, compute_tag

_BUILD_SECONDS = 3600.0
_PUSH_SECONDS = 3600.0
_PULL_SECONDS = 600.0

CODE_FOLDER = "/home/trainer"  # where the Dockerfiles of `images/` copy the folder of `image.code`
_UNKNOWN_TAG = "TAG"  # in printed commands, while a base image still has to be pulled

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


@dataclass(frozen=True)
class ImagePlan:
    """The state of an image in the engine's store."""

    spec: ImageSpec
    docker: str  # the client
    tag: str  # unknown while base images are missing
    base_ids: Mapping[str, str]  # of the base images in the store
    missing_bases: Sequence[str]
    image_id: str | None  # sha256:..., when the image is in the store

    @property
    def local(self) -> str:
        return f"{self.spec.name}:{self.tag}"

    @property
    def remote(self) -> str | None:
        """The name under which it is pushed, if it has a repository."""
        return f"{self.spec.repository}:{self.tag}" if self.spec.repository else None

    @property
    def work_folder(self) -> Path:
        """Where the build context is assembled."""
        return where() / "images" / self.tag

    @property
    def push_record(self) -> Path:
        """The file with the name by digest of the last push."""
        return where() / "images" / f"{self.tag}.pushed"

    def last_push(self) -> str | None:
        """Returns the name by digest of the last push, if it is recorded and was to the same repository."""
        with contextlib.suppress(OSError, ValueError):
            name = self.push_record.read_text(encoding="utf-8").strip()
            return name if name.startswith(f"{self.spec.repository}@sha256:") else None
        return None


def make_plan(spec: ImageSpec) -> ImagePlan:
    """Returns what the engine's store has and lacks of an image and its bases; reads the image's files for the tag,
    which is unknown while a base is missing. Changes nothing, and needs no running engine (its store counts as empty).
    Raises BadInput for a file that can't be read, CommandMissing without a docker client."""
    docker = engine.client()
    names = base_images(spec)
    base_ids = {name: image_id for name in names if (image_id := engine.find_image_id(docker, name))}
    missing = [name for name in names if name not in base_ids]
    tag = _UNKNOWN_TAG if missing else compute_tag(spec, base_ids)
    image_id = None if missing else engine.find_image_id(docker, f"{spec.name}:{tag}")
    return ImagePlan(spec, docker, tag, base_ids, missing, image_id)


def find_pushed(spec: ImageSpec) -> str | None:
    """Returns the image's name by digest if the registry has it, else that of the last push recorded on this machine;
    None without both, or while a base is missing. Raises as `make_plan`."""
    plan = make_plan(spec)
    return None if plan.missing_bases else _find(plan) or plan.last_push()


def _find(plan: ImagePlan) -> str | None:
    """Returns the name that hosts run: the id in the engine's store, with a repository the name by digest of what the
    registry has under the tag. Returns None if it is not there (and forgets a push), or if the only try fails."""
    if plan.remote is None:
        return plan.image_id or engine.find_image_id(plan.docker, plan.local)
    with contextlib.suppress(LaunchError, OSError):
        image, bundle = parse_reference(plan.remote), plan.spec.ca_bundle
        # One try: a push finds out more than further tries.
        with Registry(image.host, find_credentials, reads=[image.path], ca_bundle=bundle, tries=1) as registry:
            if digest := registry.find_manifest(image.path, image.tag):
                return f"{plan.spec.repository}@{digest}"
        plan.push_record.unlink(missing_ok=True)
    return None


def list_commands(spec: ImageSpec) -> list[list[str]]:
    """Returns the commands that still have to run, to show to the user: pull missing bases, and unless a push is
    recorded build (if the engine lacks the image), create the repository (if configured), tag and push; with a base
    missing, for an image `NAME:TAG`. Runs none of them, and asks the engine, but no registry. Raises as `make_plan`."""
    plan = make_plan(spec)
    docker = plan.docker
    commands = [[docker, "pull", "--quiet", base] for base in plan.missing_bases]
    if plan.last_push() is not None:
        return commands
    if plan.image_id is None:
        commands.append(build_command(plan))
    if plan.remote:
        if spec.create_repository and (repository := parse_repository(plan.remote)):
            commands.append(repository.create_command)
        commands += [[docker, "tag", plan.local, plan.remote], [docker, "push", plan.remote]]
    return commands


def build_command(plan: ImagePlan) -> list[str]:
    """Returns the `docker build` command of an image, which reads its files from `plan.work_folder`."""
    # The host's network: a proxy or a name server may listen on this machine's loopback. TPU VMs are x86-64, whatever
    # this machine is.
    command = ["env", "DOCKER_BUILDKIT=1", plan.docker, "build", "--progress", "plain"]
    command += ["--network", "host", "--platform", "linux/amd64"]
    if plan.spec.ca_bundle:
        command += ["--secret", f"id=ca,src={plan.spec.ca_bundle}"]
    for key, value in plan.spec.build_args:
        command += ["--build-arg", f"{key}={value}"]
    if plan.spec.target:
        command += ["--target", plan.spec.target]
    folder = plan.work_folder
    return [*command, "--tag", plan.local, "--file", str(folder / "Dockerfile"), str(folder / "context")]


def ensure_image(spec: ImageSpec, say: Callable[[str], None]) -> Image:
    """Returns the image after pulling its bases, building it and, with `spec.repository` (created if configured),
    pushing it, as far as needed; waits without limit for another process that does. If an image that was pushed before
    can't be pushed again, hosts get the earlier push, and `say` a line. Raises BadInput without engine or base, or if
    files change; LaunchError, with docker's last lines and the log's path, if the build (BAD_INPUT) or push failed."""
    docker = engine.require_engine()
    plan = make_plan(spec)
    for base in plan.missing_bases:
        _pull(docker, base, say)
    plan = make_plan(spec) if plan.missing_bases else plan
    reference = _find(plan)
    if reference is None:
        with _open_log(plan.tag, say) as (log, waited):
            # Another process may have made it while this one waited.
            reference = (waited and _find(plan)) or _make(plan, log, say)
    code = {path.removeprefix("code/"): found for path, found in spec.hashes.items() if path.startswith("code/")}
    return Image(reference, code)


def _make(plan: ImagePlan, log: IO[str], say: Callable[[str], None]) -> str:
    """Builds the image unless the engine has it, pushes it to its repository (created if configured), and returns its
    name for hosts: that of an earlier push if this one fails, the image's id without a repository. Raises as
    `ensure_image`; the caller holds the lock of the log."""
    image_id = engine.find_image_id(plan.docker, plan.local)
    if image_id is None:
        _build(plan, log, say)
        image_id = engine.find_image_id(plan.docker, plan.local)
    if image_id is None:
        raise LaunchError(
            f"docker reported success, but its store shows no {plan.local}: was it removed meanwhile? Try again"
        )
    if plan.remote is None:
        return image_id
    try:
        if plan.spec.create_repository and require_repository(plan.remote):
            say(f"created the repository of {plan.spec.repository}: private, as the project's")
        return _push(plan, plan.remote, log, say)
    except LaunchError as error:
        if (earlier := plan.last_push()) is None:
            raise
        say(f"{str(error).splitlines()[0]}; it was pushed before, and hosts get that: {earlier}")
        return earlier


def _pull(docker: str, base: str, say: Callable[[str], None]) -> None:
    """Pulls a base image, for ten minutes at most. Raises BadInput with docker's last line when that fails."""
    say(f"pulling {base}")
    result = shell.run([docker, "pull", "--quiet", base], timeout=_PULL_SECONDS)
    if not result.ok:
        lines = result.stderr.strip().splitlines() or ["no reason given"]
        raise BadInput(
            f"the base image {base} is not in the engine's store and can't be pulled: {lines[-1]}\n"
            "  let the engine reach a registry, or make the image (tools/base-image.sh of tpu-launch makes "
            "debian:bookworm-slim)"
        )


def _build(plan: ImagePlan, log: IO[str], say: Callable[[str], None]) -> None:
    """Builds from a copy of the files in `plan.work_folder`, which it deletes afterwards. Raises as `_copy_files`, and
    LaunchError (BAD_INPUT, or PERMISSION) if the build fails."""
    folder = plan.work_folder
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _copy_files(plan)
        say(f"building {plan.local}" + (f" (target {plan.spec.target})" if plan.spec.target else ""))
        begin = time.monotonic()
        failure = f"{plan.local} could not be built"
        command = build_command(plan)
        show = show_steps(say)
        _stream(command, log, _BUILD_SECONDS, failure, Exit.BAD_INPUT, refused=_REFUSED_IN_BUILD, show=show)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"built {plan.local} in {time.monotonic() - begin:.0f} s")


def _copy_files(plan: ImagePlan) -> None:
    """Copies the context and the Dockerfile of an image to `plan.work_folder`. Raises BadInput if a file is missing or
    has changed since the plan (the tag differs)."""
    spec, folder = plan.spec, plan.work_folder
    with contextlib.suppress(FileNotFoundError):
        build_context.assemble(spec.context, folder / "context")
        shutil.copyfile(spec.dockerfile, folder / "Dockerfile")
        copied = replace(spec, context=build_context.tree(folder / "context"), dockerfile=folder / "Dockerfile")
        if compute_tag(copied, plan.base_ids) == plan.tag:
            return
    raise BadInput(f"files of the image {spec.name} changed while they were copied: try again")


def _push(plan: ImagePlan, remote: str, log: IO[str], say: Callable[[str], None]) -> str:
    """Tags and pushes the image, records the push after docker has reported success, and returns the name by digest.
    Raises LaunchError."""
    say(f"pushing {remote}")
    tag, push = [plan.docker, "tag", plan.local, remote], [plan.docker, "push", remote]
    _stream(tag, log, engine.SECONDS, f"{remote} could not be tagged")
    advice = advise_creation(remote)
    lines = _stream(push, log, _PUSH_SECONDS, f"{remote} could not be pushed", missing_repository=advice)
    digests = re.findall(r"\bdigest: (sha256:[0-9a-f]{64})\b", "\n".join(lines))
    name = f"{plan.spec.repository}@{digests[-1]}" if digests else _find(plan)
    if name is None:
        raise LaunchError(f"docker pushed {remote} without reporting a digest; its output: {log.name}")
    write_private(plan.push_record, f"{name}\n")
    return name


def _stream(
    argv: Sequence[str],
    log: IO[str],
    seconds: float,
    failure: str,
    code: Exit = Exit.CLOUD_ERROR,
    *,
    missing_repository: str = "",
    refused: str = _REFUSED,
    show: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Runs a docker command, `seconds` at most (then CommandTimeout); its lines go to the log and to `show`. Returns
    those that are not blank. If it fails, raises LaunchError with `failure`, the last lines and `code`; with PERMISSION
    instead if these lines match `refused` (the registry refuses the credentials), with BAD_INPUT and the advice
    `missing_repository` if that is given and the registry has no such repository."""
    lines: list[str] = []

    def keep(line: str) -> None:
        log.write(line + "\n")
        log.flush()
        if line.strip():
            lines.append(line)
        show(line)

    log.write(f"$ {shlex.join(argv)}\n")
    result = shell.stream(argv, keep, timeout=seconds)
    if result.ok:
        return lines
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
    """Returns a function to be called with each line of BuildKit's plain output; through it, `say` receives a line for
    each step that runs: no cached step, no FROM."""
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


@contextlib.contextmanager
def _open_log(name: str, say: Callable[[str], None]) -> Iterator[tuple[IO[str], bool]]:
    """Opens the log of a tag's builds and holds its lock in the block; waits for it without limit, and says so. Yields
    the log, and whether it waited. Raises BadInput as `home` and `lock`."""
    folder = home() / "images"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}.log"
    with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
        if waited := not lock(log, path):
            say(f"waiting: another process builds the same image and holds {path}")
            lock(log, path, wait=True)
        yield log, waited
