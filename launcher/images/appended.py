"""Images that are made without a container engine: files appended to a base image, in the registry.

Only what the registry lacks travels: the layers of the base are there already (or come from another repository of the
same registry without their bytes), the same files are the same layer. Needs Python, a network, and gcloud for
Google's registries.

What can fail half-way: layers without a manifest are nothing, and the next call goes on with them. The tag says what
the image is made from, and is written last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import BadInput
from launcher.images import registry as artifact_registry
from launcher.images.build_context import Entry
from launcher.images.distribution import credentials
from launcher.images.distribution.client import Blob, Registry, blob_of
from launcher.images.distribution.layer import Layer, digest_of, make_layers
from launcher.images.distribution.manifest import (
    Descriptor,
    ImageManifest,
    LayerInfo,
    append,
    choose,
    read_config,
    read_image,
)
from launcher.images.distribution.reference import Reference, parse

_LABEL = "tpu-launch.framework"  # of images that have what the `training` package needs
_TRAINING = "/opt/tpu-launch/training"  # as in images/*/Dockerfile


@dataclass(frozen=True)
class AppendSpec:
    """What is appended to what, and where it goes."""

    base: Reference

    advice: str
    """What to do when the base is not there."""

    repository: str
    """HOST/PATH of the image."""

    training: tuple[Entry, ...]
    """The trainer's package: for images that can run it."""

    code: tuple[Entry, ...] = ()
    """The user's own files: for the working directory."""

    create_repository: bool = False
    ca_bundle: Path | None = None


@dataclass(frozen=True)
class _Base:
    """A base image, read."""

    digest: str
    manifest: ImageManifest
    config: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """What containers of it start with: the working directory, labels."""
        return dict(self.config.get("config") or {})


def find(spec: AppendSpec) -> str | None:
    """The spec's image as REPOSITORY@sha256:..., where the registry has it; nothing is sent. Raises as `ensure`."""
    target = parse(spec.repository)
    with _open(spec, target, writes=False) as registry:
        base = _read_base(registry, spec)
        digest = registry.find_manifest(target.path, digest_of(_make_layers(spec, base), base.digest))
    return f"{target.repository}@{digest}" if digest else None


def ensure(spec: AppendSpec, on_line: Callable[[str], None]) -> str:
    """The spec's image as REPOSITORY@sha256:..., put together in the registry unless it is there.

    Args:
        spec: the image.
        on_line: is given a few lines to show.

    Raises:
        BadInput: the base is not there or can't be used, or a file can't be read.
        LaunchError: the registry refuses us or does not answer.
    """
    target = parse(spec.repository)
    with _open(spec, target, writes=True) as registry:
        base = _read_base(registry, spec)
        layers = _make_layers(spec, base)
        tag = digest_of(layers, base.digest)
        if digest := registry.find_manifest(target.path, tag):
            return f"{target.repository}@{digest}"
        if spec.create_repository and artifact_registry.require(target.repository):
            on_line(f"made the repository of {target.repository}: private, as the project's")
        on_line(f"appending {len(layers)} layer{'s' if len(layers) > 1 else ''} to {spec.base}")
        begin = time.monotonic()
        digest = _push(registry, target, tag, spec.base, base, layers)
        seconds = time.monotonic() - begin
        on_line(f"pushed {target.repository}:{tag}: sent {_size(registry.bytes_sent)} in {seconds:.1f} s")
    return f"{target.repository}@{digest}"


def _open(spec: AppendSpec, target: Reference, *, writes: bool) -> Registry:
    if target.host != spec.base.host:
        raise BadInput(
            f"image.base {spec.base} is in another registry than image.repository {spec.repository}: "
            f"copy it to a repository of {target.host} once"
        )
    return Registry(
        target.host,
        credentials.find,
        writes=target.path if writes else None,
        reads=[spec.base.path, target.path],
        ca_bundle=spec.ca_bundle,
    )


def _read_base(registry: Registry, spec: AppendSpec) -> _Base:
    name, path = str(spec.base), spec.base.path
    document = registry.read_manifest(path, spec.base.version)
    if document is None:
        raise BadInput(f"{name} is not in the registry: {spec.advice}")
    if chosen := choose(document, name):
        document = registry.require_manifest(path, chosen)
    manifest = read_image(document, name)
    config = read_config(registry.read_blob(path, manifest.config.digest, manifest.config.size), name)
    return _Base(document.digest, manifest, config)


def _make_layers(spec: AppendSpec, base: _Base) -> list[Layer]:
    layers = []
    if _LABEL in (base.settings.get("Labels") or {}):
        layers += make_layers(spec.training, _TRAINING, "tpu-launch: the trainer")
    if spec.code:
        layers += make_layers(spec.code, base.settings.get("WorkingDir") or "/", "tpu-launch: image.code")
    if not layers:
        raise BadInput(f"{spec.base} has no label {_LABEL}, so that there is nothing to append: give image.code")
    return layers


def _push(registry: Registry, target: Reference, tag: str, source: Reference, base: _Base, layers: list[Layer]) -> str:
    """Sends what the registry lacks, the manifest last; returns its digest."""
    if source.path != target.path:
        for descriptor in base.manifest.layers:
            registry.upload(target.path, _elsewhere(descriptor, source), source=source.path)
    appended = []
    for layer in layers:
        blob = layer.compress()
        registry.upload(target.path, blob)
        appended.append(LayerInfo(Descriptor(blob.digest, blob.size), layer.diff_id, layer.title))
    document, config = append(base.manifest, base.config, appended, str(source))
    registry.upload(target.path, blob_of(config))
    registry.write_manifest(target.path, tag, document)
    return document.digest


def _elsewhere(descriptor: Descriptor, source: Reference) -> Blob:
    """A blob that this machine does not have: it must come from its repository within the registry."""

    def refuse() -> Any:
        raise BadInput(
            f"the registry {source.host} does not take layers of {source.repository} into another repository: "
            "give this account the right to read it, or set image.repository to the repository of image.base"
        )

    return Blob(descriptor.digest, descriptor.size, refuse)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
