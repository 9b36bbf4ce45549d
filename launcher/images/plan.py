"""What has to be done for an image, compared with what the engine's store has: pull bases, build, push.

With a repository, hosts run `repository@sha256:...`; without one (an emulated slice), the local image id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from launcher.home import where
from launcher.images import engine, pushed, registry, store
from launcher.images.specification import ImageSpec, base_images, compute_tag

_UNKNOWN_TAG = "TAG"  # in printed commands, while a base image still has to be pulled


@dataclass(frozen=True)
class ImagePlan:
    """What the engine's store has of a spec. While base images are missing, the tag is not known, and neither is
    anything about the image."""

    docker: str
    """The client."""

    tag: str
    base_ids: tuple[tuple[str, str], ...]

    local: str
    """name:tag"""

    remote: str | None
    """repository:tag"""

    missing_bases: tuple[str, ...]

    image_id: str | None = None
    """sha256:..., when the image is in the store."""

    pushed: str | None = None
    """repository@sha256:..., when it was pushed."""

    pushed_recently: bool = False

    @property
    def reference(self) -> str | None:
        """What hosts are to run; None while something has to be built or pushed."""
        return self.pushed if self.remote else self.image_id

    @property
    def needs_push(self) -> bool:
        """Whether the registry may lack the image."""
        return self.remote is not None and not self.pushed_recently

    @property
    def work_folder(self) -> Path:
        """Where the build context is assembled."""
        return where() / "images" / self.tag


def make_plan(spec: ImageSpec) -> ImagePlan:
    """The spec's tag, and what of it is there already. Changes nothing, and needs no engine that runs."""
    docker = engine.client()
    names = base_images(spec)
    base_ids = {name: image_id for name in names if (image_id := store.find_id(docker, name))}
    missing = tuple(name for name in names if name not in base_ids)
    tag = _UNKNOWN_TAG if missing else compute_tag(spec, base_ids)
    remote = f"{spec.repository}:{tag}" if spec.repository else None
    return refresh(ImagePlan(docker, tag, tuple(base_ids.items()), f"{spec.name}:{tag}", remote, missing))


def refresh(plan: ImagePlan) -> ImagePlan:
    """The plan with what the store has now, and what of it was pushed: by a record, and by the engine's own word."""
    if plan.missing_bases:
        return plan
    image_id = store.find_id(plan.docker, plan.local)
    push = pushed.find(plan.tag, plan.remote, image_id) if plan.remote and image_id else None
    if push is None or push.digest not in store.find_digests(plan.docker, push.remote):
        return replace(plan, image_id=image_id, pushed=None, pushed_recently=False)
    reference = f"{push.remote.rpartition(':')[0]}@{push.digest}"
    return replace(plan, image_id=image_id, pushed=reference, pushed_recently=push.is_recent)


def list_commands(spec: ImageSpec) -> list[list[str]]:
    """The docker commands that would make the image now, for people to read; none when it is there."""
    plan = make_plan(spec)
    docker = plan.docker
    commands = [[docker, "pull", "--quiet", base] for base in plan.missing_bases]
    if plan.image_id is None:
        commands.append(build_command(spec, plan))
    if plan.remote and plan.needs_push:
        if spec.create_repository and (repository := registry.parse(plan.remote)):
            commands.append(repository.create_command)
        commands += [[docker, "tag", plan.local, plan.remote], [docker, "push", plan.remote]]
    return commands


def build_command(spec: ImageSpec, plan: ImagePlan) -> list[str]:
    """The `docker build` of a spec."""
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
