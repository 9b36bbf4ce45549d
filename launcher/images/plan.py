"""Compares an image's specification with the engine's store: which bases to pull, whether to build, whether to push.

With a repository, hosts run `repository@sha256:...`; without one (an emulated slice), the local image id.

Pushes that docker reported as done are recorded beside the build logs. The engine's own report is no proof: with the
containerd image store, an image has a digest of a repository (`RepoDigests`) from `docker tag` on, before anything was
sent. Pushing again is cheap: a registry that has the image takes only the manifest. So an image is pushed when there is
no record, a damaged one, or one of another engine (an emulated slice's engine pushes to an emulated registry of the
same name), and when the registry does not confirm that it has the image (users and cleanup policies delete images).
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import LaunchError
from launcher.home import where, write_private
from launcher.images import artifact_registry, engine
from launcher.images.distribution import credentials
from launcher.images.distribution.client import Registry
from launcher.images.distribution.reference import parse
from launcher.images.specification import ImageSpec, base_images, compute_tag

_UNKNOWN_TAG = "TAG"  # in printed commands, while a base image still has to be pulled


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
    """Returns what the engine's store has and lacks of an image and its bases; changes nothing, and needs no running
    engine. Raises BadInput for a Dockerfile that can't be read, CommandMissing without a docker client."""
    docker = engine.client()
    names = base_images(spec)
    base_ids = {name: image_id for name in names if (image_id := engine.find_image_id(docker, name))}
    missing = tuple(name for name in names if name not in base_ids)
    tag = _UNKNOWN_TAG if missing else compute_tag(spec, base_ids)
    remote = f"{spec.repository}:{tag}" if spec.repository else None
    return refresh(ImagePlan(docker, tag, tuple(base_ids.items()), f"{spec.name}:{tag}", remote, missing))


def refresh(plan: ImagePlan) -> ImagePlan:
    """Returns the plan with the store's present image id and the recorded push; unchanged if a base is missing."""
    if plan.missing_bases:
        return plan
    image_id = engine.find_image_id(plan.docker, plan.local)
    push = None
    if plan.remote and image_id:
        wanted = (plan.remote, image_id, _current_engine())
        push = next(
            (push for push in _read_pushes(plan.tag) if (push.remote, push.image_id, push.engine) == wanted), None
        )
    if push is None or push.digest not in engine.find_digests(plan.docker, push.remote):
        return replace(plan, image_id=image_id, pushed=None)
    return replace(plan, image_id=image_id, pushed=f"{push.remote.rpartition(':')[0]}@{push.digest}")


def confirm_push(plan: ImagePlan, ca_bundle: Path | None) -> bool:
    """Asks the registry once whether it has the pushed image. Returns False for no, for no answer and for no push."""

    def give_up(_seconds: float) -> None:
        """Raises LaunchError in place of the pause before a second try."""
        raise LaunchError("a push finds out more than further tries")

    if plan.pushed is None:
        return False
    try:
        image = parse(plan.pushed)
        with Registry(image.host, credentials.find, reads=[image.path], ca_bundle=ca_bundle, sleep=give_up) as registry:
            return registry.find_manifest(image.path, image.digest) is not None
    except LaunchError:
        return False


def record_push(tag: str, remote: str, image_id: str, digest: str) -> None:
    """Records a push in place of this engine's last one to `remote`. The caller holds the lock of the image's log."""
    push = _Push(remote, image_id, digest, _current_engine())
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


def _current_engine() -> str:
    """Returns DOCKER_HOST, or "" for the machine's own engine."""
    return os.environ.get("DOCKER_HOST", "")


def list_commands(spec: ImageSpec) -> list[list[str]]:
    """Returns the commands that still have to run, to show to the user: pull missing bases, build unless the engine has
    the image, and unless a push is recorded create the repository (if configured), tag and push."""
    plan = make_plan(spec)
    docker = plan.docker
    commands = [[docker, "pull", "--quiet", base] for base in plan.missing_bases]
    if plan.image_id is None:
        commands.append(build_command(spec, plan))
    if plan.remote and plan.pushed is None:
        if spec.create_repository and (repository := artifact_registry.parse(plan.remote)):
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
