"""Manifests and configurations of images: read, checked, and extended by layers. Pure.

Both families of types are understood, OCI's and docker's (version 2, schema 2); an image stays in its family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import BadInput
from launcher.images.distribution.client import Document, sha256

_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_MOST_LAYERS = 125  # overlay file systems take 128; an engine needs some of them
_EPOCH = "1970-01-01T00:00:00Z"  # of what is made the same way every time


@dataclass(frozen=True)
class Descriptor:
    """A blob, as a manifest names it."""

    digest: str
    size: int


@dataclass(frozen=True)
class LayerInfo:
    """A layer that is to be appended."""

    blob: Descriptor
    """The compressed archive."""

    diff_id: str
    """sha256:... of the archive before compression."""

    history: str
    """What made it, for people who look at the image's history."""


@dataclass(frozen=True)
class ImageManifest:
    """One image for one platform."""

    media_type: str
    fields: Mapping[str, Any]

    @property
    def config(self) -> Descriptor:
        """Its configuration."""
        return _descriptor(self.fields["config"])

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        """Its layers, the lowest first."""
        return tuple(_descriptor(layer) for layer in self.fields["layers"])


def choose(document: Document, name: str) -> str | None:
    """The digest of the image for TPU VMs (linux/amd64) in an index; None when the document is an image. Raises
    BadInput when the index has none."""
    if document.media_type not in _INDEXES:
        return None
    for entry in _parse(document, name).get("manifests", []):
        platform = entry.get("platform") or {}
        if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
            return str(entry["digest"])
    raise BadInput(f"{name}: has no image for linux/amd64, which TPU VMs are")


def read_image(document: Document, name: str) -> ImageManifest:
    """An image's manifest. Raises BadInput when it is something else."""
    fields = _parse(document, name)
    media_type = document.media_type or str(fields.get("mediaType", ""))
    if media_type not in (_DOCKER_MANIFEST, _OCI_MANIFEST):
        raise BadInput(
            f"{name}: is not an image of the present form, but {media_type or 'without a type'}: push it anew"
        )
    try:
        image = ImageManifest(media_type, fields)
        assert image.config.digest, "no configuration"
        assert image.layers, "no layers"
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise BadInput(f"{name}: its manifest is damaged: {error}") from None
    return image


def read_config(data: bytes, name: str) -> dict[str, Any]:
    """An image's configuration. Raises BadInput for another platform than TPU VMs', and for what is none."""
    try:
        config = json.loads(data)
        platform = f"{config['os']}/{config['architecture']}"
        assert len(config["rootfs"]["diff_ids"]), "no layers"
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise BadInput(f"{name}: its configuration is damaged: {error}") from None
    if platform != "linux/amd64":
        raise BadInput(f"{name}: is for {platform}; TPU VMs are linux/amd64")
    assert isinstance(config, dict)
    return config


def append(
    image: ImageManifest, config: Mapping[str, Any], layers: Sequence[LayerInfo], name: str
) -> tuple[Document, bytes]:
    """The manifest and the configuration of an image with more layers; the same arguments give the same bytes.

    Args:
        image: what they come upon.
        config: its configuration.
        layers: the lowest first.
        name: of the image, for messages.

    Raises:
        BadInput: there would be too many layers.
    """
    if len(image.layers) + len(layers) > _MOST_LAYERS:
        raise BadInput(f"{name}: {len(image.layers)} layers, and {len(layers)} more are too many for container engines")
    history = [{"created": _EPOCH, "created_by": layer.history} for layer in layers]
    extended = {
        **config,
        "rootfs": {
            **config["rootfs"],
            "diff_ids": [*config["rootfs"]["diff_ids"], *(layer.diff_id for layer in layers)],
        },
        "history": [*(config.get("history") or []), *history],
    }
    extended_config = _encode(extended)
    layer_type = _OCI_LAYER if image.media_type == _OCI_MANIFEST else _DOCKER_LAYER
    entries = [{"mediaType": layer_type, "size": layer.blob.size, "digest": layer.blob.digest} for layer in layers]
    fields = {
        **image.fields,
        "config": {**image.fields["config"], "size": len(extended_config), "digest": sha256(extended_config)},
        "layers": [*image.fields["layers"], *entries],
    }
    return Document(image.media_type, _encode(fields)), extended_config


def _descriptor(entry: Mapping[str, Any]) -> Descriptor:
    return Descriptor(str(entry["digest"]), int(entry["size"]))


def _parse(document: Document, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(document.body)
        assert isinstance(fields, dict), "not a JSON object"
    except (ValueError, AssertionError) as error:
        raise BadInput(f"{name}: its manifest can't be read: {error}") from None
    return fields


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
