"""Makes an image as far as needed: compares its specification with the engine's store, pulls its bases, builds and
pushes it. With a repository, hosts run `repository@sha256:...`; without one (an emulated slice), the local image id.

A build that breaks off leaves no tag, a push no record, and the next call repeats it. Two processes that want the same
image take turns (a lock on its log).

Pushes that docker reported as done are recorded beside the build logs. The engine's own report is no proof: with the
containerd image store, an image has a digest of a repository (`RepoDigests`) from `docker tag` on, before anything was
sent. Pushing again is cheap: a registry that has the image takes only the manifest. So an image is pushed when there is
no record, a damaged one, or one of another engine (an emulated slice's engine pushes to an emulated registry of the
same name), and when the registry does not confirm that it has the image (users and cleanup policies delete images).
"""

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    image_id: str | None = None  # sha256:..., when the image is in the store
    pushed: str | None = None  # repository@sha256:..., when it was pushed

    @property
    def reference(self) -> str | None:
        """The name that hosts run; None while something has to be built or pushed."""
        return self.pushed if self.remote else self.image_id

    @property
    def work_folder(self) -> Path:
        """Where the build context is assembled."""
        return where() / "images" / self.tag


@dataclass(frozen=True)
class _Push:
    remote: str  # repository:tag
    image_id: str  # sha256:... in the engine's store
    digest: str  # sha256:... in the registry
    engine: str  # $DOCKER_HOST of the push; "" for the machine's own engine


def make_plan(spec: ImageSpec) -> ImagePlan:
    """Returns what the engine's store has and lacks of an image and its bases; reads the image's files for the tag,
    which is unknown while a base is missing. Changes nothing, and needs no running engine (its store counts as empty).
    Raises BadInput for a file that can't be read, CommandMissing without a docker client."""
    docker = engine.client()
    names = base_images(spec)
    base_ids = {name: image_id for name in names if (image_id := engine.find_image_id(docker, name))}
    missing = tuple(name for name in names if name not in base_ids)
    tag = _UNKNOWN_TAG if missing else compute_tag(spec, base_ids)
    remote = f"{spec.repository}:{tag}" if spec.repository else None
    return refresh(ImagePlan(docker, tag, tuple(base_ids.items()), f"{spec.name}:{tag}", remote, missing))


def refresh(plan: ImagePlan) -> ImagePlan:
    """Returns the plan with the store's present image id, and `pushed` if a push of this image by this engine is
    recorded on this machine and the store agrees, else None; unchanged if a base is missing."""
    if plan.missing_bases:
        return plan
    image_id = engine.find_image_id(plan.docker, plan.local)
    push = None
    if plan.remote and image_id:
        wanted = (plan.remote, image_id, os.environ.get("DOCKER_HOST", ""))
        push = next(
            (push for push in _read_pushes(plan.tag) if (push.remote, push.image_id, push.engine) == wanted), None
        )
    if push is None or push.digest not in engine.find_digests(plan.docker, push.remote):
        return replace(plan, image_id=image_id, pushed=None)
    return replace(plan, image_id=image_id, pushed=f"{push.remote.rpartition(':')[0]}@{push.digest}")


def confirm_push(plan: ImagePlan, ca_bundle: Path | None) -> bool:
    """Asks the registry once whether it has the pushed image. Returns False for no, for an error and for no push."""
    if plan.pushed is None:
        return False
    try:
        image = parse_reference(plan.pushed)
        # One try: a push finds out more than further tries.
        with Registry(image.host, find_credentials, reads=[image.path], ca_bundle=ca_bundle, tries=1) as registry:
            return registry.find_manifest(image.path, image.digest) is not None
    except LaunchError:
        return False


def record_push(tag: str, remote: str, image_id: str, digest: str) -> None:
    """Writes to a local file that this engine's image `image_id` is in `remote` (repository:tag) as `digest`, in place
    of its last push there. The caller holds the lock of the image's log."""
    push = _Push(remote, image_id, digest, os.environ.get("DOCKER_HOST", ""))
    kept = [earlier for earlier in _read_pushes(tag) if (earlier.remote, earlier.engine) != (remote, push.engine)]
    write_private(_pushes_path(tag), json.dumps([vars(entry) for entry in (*kept, push)], indent=1) + "\n")


def _read_pushes(tag: str) -> list[_Push]:
    """Returns the recorded pushes of a tag; [] when there are none or the record is damaged."""
    try:
        return [_Push(**entry) for entry in json.loads(_pushes_path(tag).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


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
    if not plan.image_id or (plan.remote and not confirm_push(plan, spec.ca_bundle)):
        with _open_log(plan.tag, say) as log:
            plan = refresh(plan)  # another process may have built it while we waited
            if not plan.image_id:
                _build(spec, plan, log, say)
                plan = refresh(plan)
            if plan.remote and plan.image_id and not confirm_push(plan, spec.ca_bundle):
                try:
                    if spec.create_repository and require_repository(plan.remote):
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


def _push(plan: ImagePlan, remote: str, image_id: str, log: IO[str], say: Callable[[str], None]) -> None:
    """Tags and pushes the image, and records the push after docker has reported success. Raises LaunchError."""
    say(f"pushing {remote}")
    tag, push = [plan.docker, "tag", plan.local, remote], [plan.docker, "push", remote]
    _stream(tag, log, engine.SECONDS, f"{remote} could not be tagged")
    advice = advise_creation(remote)
    lines = _stream(push, log, _PUSH_SECONDS, f"{remote} could not be pushed", missing_repository=advice)
    digests = re.findall(r"\bdigest: (sha256:[0-9a-f]{64})\b", "\n".join(lines))
    digests = digests or engine.find_digests(plan.docker, remote)
    if not digests:
        raise LaunchError(f"docker pushed {remote} without reporting a digest; its output: {log.name}")
    record_push(plan.tag, remote, image_id, digests[-1])


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


@contextmanager
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
