"""Makes an image as far as needed: pulls its bases, builds it unless the engine's store has it, and pushes it unless
the registry has its tag. With a repository, hosts run `repository@sha256:...`; without one (an emulated slice), the
local image id.

A build that breaks off leaves no tag in the store, a push none in the registry, and the next call repeats it. Two
processes that want the same image take turns (a lock on its log).

An image is also pushed when the registry does not answer this process: pushing again is cheap, because a registry that
has the image takes only the manifest. The digest of the last push that docker reported as done is recorded beside the
build logs; hosts get it when the next push fails. The engine's own report (`RepoDigests`) is no proof: with the
containerd image store, an image has a digest of a repository from `docker tag` on, before anything was sent.
"""

import contextlib
import json
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
_BUILDKIT = {"DOCKER_BUILDKIT": "1"}
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
    """The state of an image in the engine's store. The tag is unknown while base images are missing."""

    docker: str  # the client
    tag: str
    base_ids: tuple[tuple[str, str], ...]
    local: str  # name:tag
    remote: str | None  # repository:tag
    missing_bases: tuple[str, ...]
    image_id: str | None  # sha256:..., when the image is in the store
    pushed: str | None  # repository@sha256:..., when this machine has recorded a push

    @property
    def work_folder(self) -> Path:
        """Where the build context is assembled."""
        return where() / "images" / self.tag


def make_plan(spec: ImageSpec) -> ImagePlan:
    """Returns what the engine's store has and lacks of an image and its bases; reads the image's files for the tag,
    which is unknown while a base is missing. Changes nothing, and needs no running engine (its store counts as empty).
    Raises BadInput for a file that can't be read, CommandMissing without a docker client."""
    docker = engine.client()
    names = base_images(spec)
    base_ids = {name: image_id for name in names if (image_id := engine.find_image_id(docker, name))}
    missing = tuple(name for name in names if name not in base_ids)
    tag = _UNKNOWN_TAG if missing else compute_tag(spec, base_ids)
    local = f"{spec.name}:{tag}"
    image_id = None if missing else engine.find_image_id(docker, local)
    remote = f"{spec.repository}:{tag}" if spec.repository else None
    pushed = _last_push(spec, tag)
    return ImagePlan(docker, tag, tuple(base_ids.items()), local, remote, missing, image_id, pushed)


def find_pushed(spec: ImageSpec) -> str | None:
    """Returns the image's name by digest if the registry has it, else that of the last push recorded on this machine;
    None without both, or while a base is missing. Raises as `make_plan`."""
    plan = make_plan(spec)
    return plan.pushed if plan.missing_bases else _find(spec, plan) or plan.pushed


def _find(spec: ImageSpec, plan: ImagePlan) -> str | None:
    """Returns the name that hosts run: the id in the engine's store, with a repository the name by digest of what the
    registry has under the tag. Returns None if it is not there, and if the registry does not answer at once."""
    if plan.remote is None:
        return plan.image_id or engine.find_image_id(plan.docker, plan.local)
    with contextlib.suppress(LaunchError):
        image, bundle = parse_reference(plan.remote), spec.ca_bundle
        # One try: a push finds out more than further tries.
        with Registry(image.host, find_credentials, reads=[image.path], ca_bundle=bundle, tries=1) as registry:
            if digest := registry.find_manifest(image.path, image.tag):
                return f"{spec.repository}@{digest}"
    return None


def _read_pushes(tag: str) -> dict[str, str]:
    """Returns the digests of the last recorded pushes of a tag, by repository; {} without a record or if damaged."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(_pushes_path(tag).read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    return {}


def _last_push(spec: ImageSpec, tag: str) -> str | None:
    """Returns the name by digest of the last recorded push to the image's repository; None without one."""
    digest = _read_pushes(tag).get(spec.repository or "")
    return f"{spec.repository}@{digest}" if digest else None


def _pushes_path(tag: str) -> Path:
    return where() / "images" / f"{tag}.pushed.json"


def list_commands(spec: ImageSpec) -> list[list[str]]:
    """Returns the commands that still have to run, to show to the user: pull missing bases, build unless the engine has
    the image, and unless a push is recorded create the repository (if configured), tag and push; with a base missing,
    for an image `NAME:TAG`. Raises as `make_plan`."""
    plan = make_plan(spec)
    docker = plan.docker
    commands = [[docker, "pull", "--quiet", base] for base in plan.missing_bases]
    if plan.image_id is None:
        commands.append(build_command(spec, plan))
    if plan.remote and plan.pushed is None:
        if spec.create_repository and (repository := parse_repository(plan.remote)):
            commands.append(repository.create_command)
        commands += [[docker, "tag", plan.local, plan.remote], [docker, "push", plan.remote]]
    return commands


def build_command(spec: ImageSpec, plan: ImagePlan) -> list[str]:
    """Returns the `docker build` command of an image, which reads its files from `plan.work_folder`."""
    # The host's network: a proxy or a name server may listen on this machine's loopback. TPU VMs are x86-64, whatever
    # this machine is.
    command = [plan.docker, "build", "--progress", "plain", "--network", "host", "--platform", "linux/amd64"]
    if spec.ca_bundle:
        command += ["--secret", f"id=ca,src={spec.ca_bundle}"]
    for key, value in spec.build_args:
        command += ["--build-arg", f"{key}={value}"]
    if spec.target:
        command += ["--target", spec.target]
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
    reference = _find(spec, plan)
    if reference is None:
        with _open_log(plan.tag, say) as log:
            # Another process may have made it while this one waited.
            reference = _find(spec, plan) or _make(spec, plan, log, say)
    code = {path.removeprefix("code/"): found for path, found in spec.hashes.items() if path.startswith("code/")}
    return Image(reference, code)


def _make(spec: ImageSpec, plan: ImagePlan, log: IO[str], say: Callable[[str], None]) -> str:
    """Builds the image unless the engine has it, pushes it, and returns its name for hosts. Raises as `ensure_image`;
    the caller holds the lock of the log."""
    if not engine.find_image_id(plan.docker, plan.local):
        _build(spec, plan, log, say)
    image_id = engine.find_image_id(plan.docker, plan.local)
    if image_id is None:
        raise LaunchError(
            f"docker reported success, but its store has no {plan.local}: was it removed meanwhile? Try again"
        )
    if plan.remote is None:
        return image_id
    try:
        if spec.create_repository and require_repository(plan.remote):
            say(f"created the repository of {spec.repository}: private, as the project's")
        return _push(spec, plan, plan.remote, log, say)
    except LaunchError as error:
        if (earlier := _last_push(spec, plan.tag)) is None:
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


def _build(spec: ImageSpec, plan: ImagePlan, log: IO[str], say: Callable[[str], None]) -> None:
    """Builds from a copy of the context in `plan.work_folder`, which it deletes afterwards. Raises BadInput if files
    have changed since the plan (the tag differs), LaunchError (BAD_INPUT, or PERMISSION) if the build fails."""
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
        show = show_steps(say)
        _stream(command, log, _BUILD_SECONDS, failure, Exit.BAD_INPUT, refused=_REFUSED_IN_BUILD, show=show)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"built {plan.local} in {time.monotonic() - begin:.0f} s")


def _push(spec: ImageSpec, plan: ImagePlan, remote: str, log: IO[str], say: Callable[[str], None]) -> str:
    """Tags and pushes the image, records the push after docker has reported success, and returns the name by digest.
    Raises LaunchError."""
    say(f"pushing {remote}")
    tag, push = [plan.docker, "tag", plan.local, remote], [plan.docker, "push", remote]
    _stream(tag, log, engine.SECONDS, f"{remote} could not be tagged")
    advice = advise_creation(remote)
    lines = _stream(push, log, _PUSH_SECONDS, f"{remote} could not be pushed", missing_repository=advice)
    digests = re.findall(r"\bdigest: (sha256:[0-9a-f]{64})\b", "\n".join(lines))
    if not digests:
        raise LaunchError(f"docker pushed {remote} without reporting a digest; its output: {log.name}")
    pushes = {**_read_pushes(plan.tag), str(spec.repository): digests[-1]}
    write_private(_pushes_path(plan.tag), json.dumps(pushes, indent=1) + "\n")
    return f"{spec.repository}@{digests[-1]}"


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
    result = shell.stream(argv, keep, timeout=seconds, env=_BUILDKIT)
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
def _open_log(name: str, say: Callable[[str], None]) -> Iterator[IO[str]]:
    """Opens the log of a tag's builds and holds its lock in the block; waits for it without limit, and says so."""
    folder = home() / "images"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}.log"
    with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
        if not lock(log, path):
            say(f"waiting: another process builds the same image and holds {path}")
            lock(log, path, wait=True)
        yield log
