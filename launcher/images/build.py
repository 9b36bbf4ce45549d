"""Content-addressed images: what an image is built from decides its tag, so nothing changed means nothing is built and
nothing is pushed.

The tag is a hash of the build context, the Dockerfile, the build arguments, the target stage and the base images' ids.
A CA bundle is not part of it: it reaches the build as a secret and enters no layer. With a repository, hosts run
`repository@sha256:...`; without one (an emulated slice), the local image id. Failure model: a build or push that breaks
off leaves no tag behind, and the next call does it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import training
from launcher import shell
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import home, where
from launcher.images import build_context, engine
from launcher.images import registry as registries
from launcher.images.build_context import Entry
from launcher.installation import shared_folder

_BUILD_SECONDS = 3600.0
_PUSH_SECONDS = 3600.0
_PULL_SECONDS = 600.0
_QUESTION_SECONDS = 30.0
_UNPACKED = 2.5  # times what a registry holds, about
_UNKNOWN_TAG = "TAG"  # in printed commands, while a base image still has to be pulled

_BUILDKIT = {"DOCKER_BUILDKIT": "1"}


@dataclass(frozen=True)
class ImageSpec:
    """What an image is built from, and where it goes. `name` is its local repository; `context` as made by
    `build_context`."""

    name: str
    dockerfile: Path
    context: tuple[Entry, ...]
    build_args: tuple[tuple[str, str], ...] = ()
    target: str | None = None
    repository: str | None = None
    ca_bundle: Path | None = None
    create_repository: bool = False  # when it is not there


@dataclass(frozen=True)
class ImagePlan:
    """What the engine's store says about a spec. While bases are missing, the tag is not known, and neither is anything
    about the image."""

    docker: str
    tag: str
    base_ids: tuple[tuple[str, str], ...]
    local: str  # name:tag
    remote: str | None  # repository:tag
    missing_bases: tuple[str, ...]
    image_id: str | None = None  # sha256:..., when the image is in the local store
    pushed: str | None = None  # repository@sha256:..., when it was pushed

    @property
    def reference(self) -> str | None:
        """What hosts are to run; None while something has to be built or pushed."""
        return self.pushed if self.remote else self.image_id


@dataclass(frozen=True)
class Image:
    """An image that hosts can run: `reference` is what they are given, `digest` the sha256:... in it."""

    reference: str
    digest: str


def default_spec(
    backend: str,
    *,
    repository: str | None = None,
    build_args: Mapping[str, str] | None = None,
    ca_bundle: Path | None = None,
    target: str | None = None,
    code: Path | None = None,
) -> ImageSpec:
    """Our own image for `backend` ("torch-xla", "tensorflow"): images/<backend>, and the `training` package of this
    installation.

    `code`: a folder of the user's own, which comes to the image's working directory, but for what its .dockerignore
    names. Without `ca_bundle`, the file that TPU_LAUNCH_CA_BUNDLE names is used. Raises BadInput.
    """
    source = shared_folder("images") / backend
    if not (source / "Dockerfile").is_file():
        known = sorted(path.parent.name for path in shared_folder("images").glob("*/Dockerfile"))
        raise BadInput(f"there is no image for backend {backend!r}; there are: {', '.join(known) or 'none'}")
    package = Path(training.__path__[0])
    context = (
        *build_context.tree(source, ignore=("Dockerfile", "*.in")),
        *build_context.tree(package, below="training", ignore=("**/__pycache__", "**/*.pyc")),
        # A folder that is always there: the Dockerfile copies it.
        *(
            ((f"code/{path}", file) for path, file in build_context.folder(code))
            if code
            else (("code/.none", package / "__init__.py"),)
        ),
    )
    return ImageSpec(
        f"tpu-launch/{backend}",
        source / "Dockerfile",
        context,
        _sorted(build_args),
        target,
        repository,
        _ca_bundle(ca_bundle),
    )


def folder_spec(
    name: str,
    context: Path,
    *,
    dockerfile: Path | None = None,
    repository: str | None = None,
    build_args: Mapping[str, str] | None = None,
    ca_bundle: Path | None = None,
    target: str | None = None,
) -> ImageSpec:
    """An image of the user's own (or the emulator's): a folder, honouring its .dockerignore, and its Dockerfile. Raises
    BadInput."""
    dockerfile = dockerfile or context / "Dockerfile"
    if not dockerfile.is_file():
        raise BadInput(f"{dockerfile}: there is no such Dockerfile")
    return ImageSpec(
        name, dockerfile, build_context.folder(context), _sorted(build_args), target, repository, _ca_bundle(ca_bundle)
    )


def bases(dockerfile: str, build_args: Mapping[str, str]) -> tuple[str, ...]:
    """The images that a Dockerfile's stages start from, without the stages themselves. Arguments before the first FROM
    are filled in."""
    values: dict[str, str] = {}
    stages: set[str] = set()
    found: dict[str, None] = {}
    for line in re.sub(r"\\[ \t]*\n", " ", dockerfile).splitlines():
        words = line.split()
        match [words[0].upper(), *words[1:]] if words else []:
            case ["ARG", declaration] if not found:
                key, _, value = declaration.partition("=")
                values[key] = build_args.get(key, value.strip("\"'"))
            case ["FROM", *rest]:
                image, *alias = [word for word in rest if not word.startswith("--")]
                image = re.sub(
                    r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))", lambda m: values.get(m[1] or m[3]) or m[2] or "", image
                )
                if image not in stages and image != "scratch":
                    found[image] = None
                if len(alias) == 2:
                    stages.add(alias[1])
    return tuple(found)


def tag(spec: ImageSpec, base_ids: Mapping[str, str]) -> str:
    """16 hex digits for everything that decides what the image holds. Pure, apart from reading the files."""
    parts = (
        build_context.digest(spec.context).hex(),
        hashlib.sha256(spec.dockerfile.read_bytes()).hexdigest(),
        sorted(spec.build_args),
        spec.target,
        sorted(base_ids.items()),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def plan(spec: ImageSpec) -> ImagePlan:
    """The spec's tag, and what of it is there already. Asks the engine's store; changes nothing, and needs no engine
    that runs."""
    docker = engine.client()
    names = bases(_text(spec.dockerfile), dict(spec.build_args))
    base_ids = {name: identity for name in names if (identity := _inspect(docker, name, "{{.Id}}"))}
    missing = tuple(name for name in names if name not in base_ids)
    name = _UNKNOWN_TAG if missing else tag(spec, base_ids)
    remote = f"{spec.repository}:{name}" if spec.repository else None
    return _look(ImagePlan(docker, name, tuple(base_ids.items()), f"{spec.name}:{name}", remote, missing))


def commands(spec: ImageSpec) -> list[list[str]]:
    """The docker commands that `ensure` would run now, for people to read; none when the image is there. Touches
    nothing."""
    return _commands(spec, plan(spec))


def ensure(spec: ImageSpec, on_line: Callable[[str], None]) -> Image:
    """The spec's image, pulled bases, built and pushed as far as needed. `on_line` gets a few lines to show.

    Raises BadInput (no engine, no base image), or LaunchError with the last lines of docker's output and the path of
    all of it.
    """
    docker = engine.require_engine()
    todo = plan(spec)
    for base in todo.missing_bases:
        on_line(f"pulling {base}")
        pulled = shell.run([docker, "pull", "--quiet", base], timeout=_PULL_SECONDS)
        if not pulled.ok:
            raise BadInput(
                f"the base image {base} is not in the engine's store and can't be pulled: {_last(pulled.stderr)}\n"
                "  let the engine reach a registry, or make the image (tools/base-image.sh of tpu-launch makes "
                "debian:bookworm-slim)"
            )
        todo = plan(spec)
    if not todo.reference:
        with _log(todo.tag, on_line) as log:
            todo = _look(todo)  # somebody else may have built it while we waited
            if not todo.image_id:
                _build(spec, todo, log, on_line)
            if todo.remote and not todo.pushed:
                if spec.create_repository and registries.require(todo.remote):
                    on_line(f"made the repository of {spec.repository}: private, as the project's")
                _push(todo, todo.remote, log, on_line)
            todo = _look(todo)
    if not todo.reference:
        raise LaunchError(
            f"docker reported success, but its store has no {todo.remote or todo.local}: was it removed meanwhile? "
            "Try again"
        )
    return Image(todo.reference, todo.reference.rpartition("@")[2])


def _look(todo: ImagePlan) -> ImagePlan:
    """The plan with what the local store says now."""
    if todo.missing_bases:
        return todo
    image_id = _inspect(todo.docker, todo.local, "{{.Id}}")
    return replace(
        todo, image_id=image_id, pushed=_pushed(todo.docker, todo.remote) if todo.remote and image_id else None
    )


def _commands(spec: ImageSpec, todo: ImagePlan) -> list[list[str]]:
    docker = todo.docker
    found = [[docker, "pull", "--quiet", base] for base in todo.missing_bases]
    if todo.image_id is None:
        found.append(_build_command(spec, todo))
    if todo.remote and not todo.pushed:
        if spec.create_repository and (repository := registries.parse(todo.remote)):
            found.append(repository.create_command)
        found += [[docker, "tag", todo.local, todo.remote], [docker, "push", todo.remote]]
    return found


def _build_command(spec: ImageSpec, todo: ImagePlan) -> list[str]:
    folder = _work_folder(todo)
    # The host's network: a proxy or a name server may listen on this machine's loopback. TPU VMs are x86-64, whatever
    # this machine is.
    command = [todo.docker, "build", "--progress", "plain", "--network", "host", "--platform", "linux/amd64"]
    if spec.ca_bundle:
        command += ["--secret", f"id=ca,src={spec.ca_bundle}"]
    for key, value in spec.build_args:
        command += ["--build-arg", f"{key}={value}"]
    if spec.target:
        command += ["--target", spec.target]
    return [*command, "--tag", todo.local, "--file", str(folder / "Dockerfile"), str(folder / "context")]


def _build(spec: ImageSpec, todo: ImagePlan, log: IO[str], on_line: Callable[[str], None]) -> None:
    folder = _work_folder(todo)
    shutil.rmtree(folder, ignore_errors=True)
    build_context.assemble(spec.context, folder / "context")
    shutil.copyfile(spec.dockerfile, folder / "Dockerfile")
    copied = replace(spec, context=build_context.tree(folder / "context"), dockerfile=folder / "Dockerfile")
    if tag(copied, dict(todo.base_ids)) != todo.tag:
        raise BadInput(f"files of the image {spec.name} changed while they were copied: try again")
    on_line(f"building {todo.local}" + (f" (target {spec.target})" if spec.target else ""))
    begin = time.monotonic()
    try:
        _stream(
            _build_command(spec, todo),
            log,
            _steps(on_line),
            _BUILD_SECONDS,
            f"{todo.local} could not be built",
            Exit.BAD_INPUT,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    on_line(f"built {todo.local} in {time.monotonic() - begin:.0f} s")


def _push(todo: ImagePlan, remote: str, log: IO[str], on_line: Callable[[str], None]) -> None:
    on_line(f"pushing {remote}")
    _stream(
        [todo.docker, "tag", todo.local, remote],
        log,
        lambda line: None,
        _QUESTION_SECONDS,
        f"{remote} could not be tagged",
    )
    _stream(
        [todo.docker, "push", remote],
        log,
        lambda line: None,
        _PUSH_SECONDS,
        f"{remote} could not be pushed",
        unknown=registries.advice(remote),
    )


def _stream(
    argv: Sequence[str],
    log: IO[str],
    on_line: Callable[[str], None],
    seconds: float,
    failure: str,
    code: Exit = Exit.CLOUD_ERROR,
    *,
    unknown: str = "",
) -> None:
    """Runs a docker command with its output in the log; its failure is a LaunchError with the output's last lines."""
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
    if unknown and re.search(r"name unknown|Repository .*not found", " ".join(lines[-5:]), re.IGNORECASE):
        code, failure = Exit.BAD_INPUT, f"{failure}: {unknown}"
    elif re.search(r"denied|unauthorized|forbidden", " ".join(lines[-5:]), re.IGNORECASE):
        code = Exit.PERMISSION
        failure += ": the registry refuses these credentials (gcloud auth configure-docker REGION-docker.pkg.dev)"
    shown = "\n".join(f"  {line}" for line in lines[-12:])
    raise LaunchError(
        f"{failure} (docker's exit code {result.returncode}); its last lines:\n{shown}\n  all of it: {log.name}",
        exit_code=code,
    )


def _steps(on_line: Callable[[str], None]) -> Callable[[str], None]:
    """Of the builder's many lines, one for each step that really runs: `#7 [a 2/4] RUN ...` that no `#7 CACHED`
    follows."""
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
def _log(name: str, on_line: Callable[[str], None]) -> Iterator[IO[str]]:
    """The log of one tag's builds, which also is the lock that keeps two launchers from building it at once."""
    folder = home() / "images"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(
        folder / f"{name}.log", "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)
    ) as log:
        end = time.monotonic() + _BUILD_SECONDS
        waiting = False
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    on_line("another process builds the same image; waiting for it")
                waiting = True
                if time.monotonic() > end:
                    raise LaunchError(
                        f"another process has held {log.name} for {_BUILD_SECONDS:.0f} s: end it and try again"
                    ) from None
                time.sleep(0.5)
        yield log


def size(reference: str) -> int | None:
    """Bytes of an image's layers on a disk, as the store of this machine knows it, else as its registry says of the
    packed ones; None: neither does."""
    try:
        docker = engine.client()
    except LaunchError:
        return None
    if found := _inspect(docker, reference, "{{.Size}}"):
        return int(found)
    answer = shell.run([docker, "manifest", "inspect", reference], timeout=_QUESTION_SECONDS)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return round(_UNPACKED * sum(int(layer["size"]) for layer in json.loads(answer.stdout)["layers"]))
    return None


def _inspect(docker: str, image: str, template: str) -> str | None:
    """What the local store says of an image; None when it has none of that name, or when no engine answers."""
    answer = shell.run([docker, "image", "inspect", "--format", template, image], timeout=_QUESTION_SECONDS)
    return answer.stdout.strip() if answer.ok else None


def _pushed(docker: str, remote: str) -> str | None:
    """repository@sha256:... under which an image of the local store is known to its registry."""
    repository = remote.rpartition(":")[0].removeprefix("docker.io/")
    digests = json.loads(_inspect(docker, remote, "{{json .RepoDigests}}") or "null") or []
    return next((str(digest) for digest in digests if str(digest).startswith(f"{repository}@")), None)


def _ca_bundle(given: Path | None) -> Path | None:
    named = os.environ.get("TPU_LAUNCH_CA_BUNDLE")
    path = given or (Path(named) if named else None)
    if path and not path.is_file():
        raise BadInput(f"{path}: there is no such CA bundle" + ("" if given else " (from TPU_LAUNCH_CA_BUNDLE)"))
    return path.absolute() if path else None


def _sorted(build_args: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((build_args or {}).items()))


def _work_folder(todo: ImagePlan) -> Path:
    return where() / "images" / todo.tag


def _text(dockerfile: Path) -> str:
    try:
        return dockerfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{dockerfile}: can't be read: {error}") from None


def _last(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else "no reason given"
