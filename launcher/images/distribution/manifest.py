"""Manifests and configurations of images: read, checked, and extended by layers. Pure.

OCI's types and docker's (version 2, schema 2) are both supported; an extended image keeps the types of its base.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import BadInput
from launcher.images.distribution.client import DOCKER_MANIFEST, INDEXES, OCI_MANIFEST, ManifestDocument, sha256
from launcher.images.distribution.layer import Layer

_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_MOST_LAYERS = 125  # overlay file systems take 128, of which engines need some
_EPOCH = "1970-01-01T00:00:00Z"  # a fixed time, so that the same layers give the same bytes


@dataclass(frozen=True)
class Descriptor:
    """A manifest's reference to a blob."""

    digest: str
    size: int


@dataclass(frozen=True)
class ImageManifest:
    """The manifest of an image for one platform."""

    media_type: str
    fields: Mapping[str, Any]
    config: Descriptor
    layers: list[Descriptor]  # the lowest first


def choose_platform(document: ManifestDocument, name: str) -> str | None:
    """Returns the digest of an index's image for linux/amd64, which TPU VMs are; None when the document is no index.
    Raises BadInput when the index has no such image."""
    if document.media_type not in INDEXES:
        return None
    for entry in _parse(document, name).get("manifests", []):
        platform = entry.get("platform") or {}
        if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
            return str(entry["digest"])
    raise BadInput(f"{name}: has no image for linux/amd64, which TPU VMs are")


def read_image(document: ManifestDocument, name: str) -> ImageManifest:
    """Returns an image's manifest. Raises BadInput when the document is something else."""
    fields = _parse(document, name)
    media_type = document.media_type or str(fields.get("mediaType", ""))
    if media_type not in (DOCKER_MANIFEST, OCI_MANIFEST):
        raise BadInput(f"{name}: its manifest is of an unsupported type, {media_type or 'none'}: push the image again")
    try:
        entries = (fields["config"], *fields["layers"])
        config, *layers = [Descriptor(str(entry["digest"]), int(entry["size"])) for entry in entries]
        assert config.digest, "no configuration"
        assert layers, "no layers"
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise BadInput(f"{name}: its manifest is damaged: {error}") from None
    return ImageManifest(media_type, fields, config, layers)


def read_config(data: bytes, name: str) -> dict[str, Any]:
    """Returns an image's configuration. Raises BadInput when it is damaged, or for a platform other than TPU VMs'."""
    try:
        config: dict[str, Any] = json.loads(data)
        platform = f"{config['os']}/{config['architecture']}"
        assert len(config["rootfs"]["diff_ids"]), "no layers"
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise BadInput(f"{name}: its configuration is damaged: {error}") from None
    if platform != "linux/amd64":
        raise BadInput(f"{name}: is for {platform}; TPU VMs are linux/amd64")
    return config


def append_layers(
    image: ImageManifest, config: Mapping[str, Any], layers: Sequence[Layer], name: str
) -> tuple[ManifestDocument, bytes]:
    """Returns the manifest and the configuration of an image extended by `layers` (the lowest first); equal arguments
    give equal bytes. `config`: that of `image`, of which only layers and history change; `name`: for messages. Raises
    BadInput if container engines do not take so many layers."""
    if len(image.layers) + len(layers) > _MOST_LAYERS:
        raise BadInput(f"{name}: {len(image.layers)} layers, and {len(layers)} more are too many for container engines")
    diff_ids = [*config["rootfs"]["diff_ids"], *(layer.diff_id for layer in layers)]
    history = [{"created": _EPOCH, "created_by": layer.title} for layer in layers]
    extended_config = _encode(
        {
            **config,
            "rootfs": {**config["rootfs"], "diff_ids": diff_ids},
            "history": [*(config.get("history") or []), *history],
        }
    )
    layer_type = _OCI_LAYER if image.media_type == OCI_MANIFEST else _DOCKER_LAYER
    entries = [{"mediaType": layer_type, "size": layer.blob.size, "digest": layer.blob.digest} for layer in layers]
    fields = {
        **image.fields,
        "config": {**image.fields["config"], "size": len(extended_config), "digest": sha256(extended_config)},
        "layers": [*image.fields["layers"], *entries],
    }
    return ManifestDocument(image.media_type, _encode(fields)), extended_config


def _parse(document: ManifestDocument, name: str) -> dict[str, Any]:
    """Returns a manifest's fields. Raises BadInput, with the image's name, unless it is a JSON object."""
    try:
        fields = json.loads(document.body)
        assert isinstance(fields, dict), "not a JSON object"
    except (ValueError, AssertionError) as error:
        raise BadInput(f"{name}: its manifest can't be read: {error}") from None
    return fields


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
