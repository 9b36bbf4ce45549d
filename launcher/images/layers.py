"""Extends an image by layers: packs files, reads and checks manifests and configurations, and adds to them. The same
files give the same bytes, on every machine and at any time.

Names are sorted, owners are root, times are 0, and modes are those of a build's COPY (build_context.assemble), so that
`docker build` makes the same content of the same files. Small files share a layer; a large file has a layer of its own,
so that a changed line does not send it again. OCI's types and docker's (version 2, schema 2) are both supported; an
extended image keeps the types of its base.
"""

import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from launcher.errors import BadInput
from launcher.images.build_context import Entry, hash_file, open_entry, unreadable
from launcher.images.registry import DOCKER_MANIFEST, INDEXES, OCI_MANIFEST, Blob, ManifestDocument, sha256

LARGE_BYTES = 4 * 2**20
_MOST_LARGE = 16  # layers of one file; the other large files share one more layer
_LEVEL = 6
_LARGEST_LAYER = 2**30  # a layer is held in memory
_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_MOST_LAYERS = 125  # overlay file systems take 128, of which engines need some
_EPOCH = "1970-01-01T00:00:00Z"  # a fixed time, so that the same layers give the same bytes


@dataclass(frozen=True)
class Layer:
    """Files as an archive."""

    archive: bytes
    hashes: Mapping[str, str]  # `build_context.hash_file` of each file, by its path in the layer's folder
    title: str  # shown in the image's history

    @functools.cached_property
    def diff_id(self) -> str:
        """The digest of the archive before compression."""
        return sha256(self.archive)

    @functools.cached_property
    def blob(self) -> Blob:
        """The compressed archive, as a registry stores it."""
        return Blob(gzip.compress(self.archive, compresslevel=_LEVEL, mtime=0))


def make_layers(entries: Sequence[Entry], folder: str, title: str) -> list[Layer]:
    """Returns the layers that add files to a folder (an absolute path) of an image, whose other files stay; [] for
    none. `title`: for the image's history. Raises BadInput when a file can't be read or a layer is above 1 GiB."""
    return [
        Layer(*_make_archive(group, folder), f"{title}{f' ({number})' if number else ''}")
        for number, group in enumerate(_group_by_layer(entries))
    ]


def _group_by_layer(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Returns the files of each layer: all below 4 MiB, all larger ones but the 16 largest, then each of these alone;
    leaves out layers without files. Raises BadInput for a file that is missing, and for a layer above 1 GiB."""
    try:
        sizes = {name: source.lstat().st_size for name, source in entries}
    except OSError as error:  # removed since it was listed
        raise unreadable(error.filename, error) from None
    large = sorted((entry for entry in entries if sizes[entry[0]] >= LARGE_BYTES), key=lambda e: (-sizes[e[0]], e[0]))
    alone, shared = large[:_MOST_LARGE], large[_MOST_LARGE:]
    small = [entry for entry in entries if sizes[entry[0]] < LARGE_BYTES]
    groups = [group for group in (small, shared, *([entry] for entry in sorted(alone))) if group]
    if above := [group for group in groups if sum(sizes[name] for name, _ in group) > _LARGEST_LAYER]:
        raise BadInput(f"{above[0][0][1]}: the files of an image's layer are more than {_LARGEST_LAYER >> 20} MiB")
    return groups


def _make_archive(entries: Sequence[Entry], folder: str) -> tuple[bytes, dict[str, str]]:
    """Returns a tar archive of the files, below `folder`, without times and owners, links as links; and `hash_file` of
    each file by its path. Raises BadInput for an unreadable file."""
    packed, folders, hashes = io.BytesIO(), set[PurePosixPath](), {}
    root = PurePosixPath(folder.lstrip("/"))
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, source in sorted(entries):
            path = root / name
            for parent in reversed(path.parents):
                # The root and the folders above it have no entries, so they keep the image's owners and modes.
                if parent.is_relative_to(root) and parent != root and parent not in folders:
                    folders.add(parent)
                    archive.addfile(_tar_entry(parent, tarfile.DIRTYPE, 0o755))
            with open_entry(source) as (kind, file):
                content = file.read()
            hashes[name] = hash_file(kind, io.BytesIO(content))
            if kind == b"link":
                entry = _tar_entry(path, tarfile.SYMTYPE, 0o777)
                entry.linkname = os.fsdecode(content)
            else:
                entry = _tar_entry(path, tarfile.REGTYPE, 0o755 if kind == b"program" else 0o644)
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue(), hashes


def _tar_entry(path: PurePosixPath, kind: bytes, mode: int) -> tarfile.TarInfo:
    """Returns an archive's entry, of root and with time 0. `kind`: a type of tarfile's."""
    entry = tarfile.TarInfo(str(path))
    entry.type, entry.mode = kind, mode
    return entry


def compute_layers_tag(layers: Sequence[Layer], base: str) -> str:
    """Returns 16 hexadecimal digits, a hash of the base image's digest `base` and of the layers before compression."""
    return hashlib.sha256("\n".join([base, *(layer.diff_id for layer in layers)]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class BaseImage:
    """An image for linux/amd64, as a registry has it and layers can be appended to it."""

    name: str  # for messages
    digest: str
    media_type: str  # of the manifest
    manifest: Mapping[str, Any]  # with `config` and `layers` (the lowest first), each with `digest` and `size`
    config: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its containers: the working directory, labels."""
        return dict(self.config.get("config") or {})

    @property
    def folder(self) -> str:
        """The working directory, to which the code goes."""
        return self.settings.get("WorkingDir") or "/"


@contextlib.contextmanager
def _refuse_damage(subject: str) -> Iterator[None]:
    """Turns errors of the block, which takes a JSON document apart, into BadInput: SUBJECT is damaged."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise BadInput(f"{subject} is damaged: {error}") from None


def choose_platform(document: ManifestDocument, name: str) -> str | None:
    """Returns the digest of an index's image for linux/amd64, which TPU VMs are; None when the document is no index.
    Raises BadInput, which begins with `name`, when the index has no such image."""
    if document.media_type not in INDEXES:
        return None
    with _refuse_damage(f"{name}: its manifest"):
        for entry in json.loads(document.body).get("manifests", []):
            platform = entry.get("platform") or {}
            if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
                return str(entry["digest"])
    raise BadInput(f"{name}: has no image for linux/amd64, which TPU VMs are")


def read_image(document: ManifestDocument, read_config: Callable[[str, int], bytes], name: str) -> BaseImage:
    """Returns the image of a manifest; `read_config` is given digest and size of its configuration, and returns its
    bytes, whose digest it verifies. Raises BadInput, which begins with `name`, when one is damaged, or of another type
    or platform. Raises what `read_config` does."""
    with _refuse_damage(f"{name}: its manifest"):
        manifest = json.loads(document.body)
        media_type = document.media_type or str(manifest.get("mediaType", ""))
        if media_type not in (DOCKER_MANIFEST, OCI_MANIFEST):
            kind = media_type or "none"
            raise BadInput(f"{name}: its manifest is of an unsupported type, {kind}: push the image again")
        first, *layers = [
            (str(entry["digest"]), int(entry["size"])) for entry in (manifest["config"], *manifest["layers"])
        ]
        assert first[0], "no configuration"
        assert layers, "no layers"
    data = read_config(*first)
    with _refuse_damage(f"{name}: its configuration"):
        config = json.loads(data)
        platform = f"{config['os']}/{config['architecture']}"
        assert len(config["rootfs"]["diff_ids"]), "no layers"
    if platform != "linux/amd64":
        raise BadInput(f"{name}: is for {platform}; TPU VMs are linux/amd64")
    return BaseImage(name, document.digest, media_type, manifest, config)


def append_layers(base: BaseImage, layers: Sequence[Layer]) -> tuple[ManifestDocument, bytes]:
    """Returns the manifest and the configuration of an image extended by `layers` (the lowest first); equal arguments
    give equal bytes. Only layers and history differ from the base's. Raises BadInput beyond _MOST_LAYERS layers, the
    base's included."""
    config, before = base.config, base.manifest["layers"]
    if len(before) + len(layers) > _MOST_LAYERS:
        raise BadInput(f"{base.name}: {len(before)} layers, and {len(layers)} more are too many for container engines")
    diff_ids = [*config["rootfs"]["diff_ids"], *(layer.diff_id for layer in layers)]
    history = [{"created": _EPOCH, "created_by": layer.title} for layer in layers]
    extended_config = _encode(
        {
            **config,
            "rootfs": {**config["rootfs"], "diff_ids": diff_ids},
            "history": [*(config.get("history") or []), *history],
        }
    )
    layer_type = _OCI_LAYER if base.media_type == OCI_MANIFEST else _DOCKER_LAYER
    entries = [{"mediaType": layer_type, "size": len(layer.blob.data), "digest": layer.blob.digest} for layer in layers]
    fields = {
        **base.manifest,
        "config": {**base.manifest["config"], "size": len(extended_config), "digest": sha256(extended_config)},
        "layers": [*before, *entries],
    }
    return ManifestDocument(base.media_type, _encode(fields)), extended_config


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
