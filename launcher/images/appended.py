"""Makes images without a container engine: appends files to a base image, in the registry.

Only what the registry lacks is sent: the layers of the base are there already (or are mounted from another repository
of the same registry), and the same files give the same layer. The tag is a hash of the base and the layers.

If a push breaks off, layers without a manifest have no effect, and the next call continues with them: the manifest with
its tag is written last.

The base of our own images is one of them without the code. Its tag is a hash of the Dockerfile, the lock files and the
build arguments, so that every machine finds the same base. It is made once, with an engine or by Cloud Build.
"""

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import BadInput
from launcher.images import build_context, engine
from launcher.images.build import Image, ensure_image
from launcher.images.build_context import Entry
from launcher.images.layers import (
    BaseImage,
    Layer,
    append_layers,
    choose_platform,
    compute_layers_tag,
    make_layers,
    read_image,
)
from launcher.images.registry import Blob, Registry
from launcher.images.repositories import Reference, find_credentials, parse_reference, require_repository
from launcher.images.specification import ImageSpec, compute_tag

_LABEL = "tpu-launch.framework"  # of images that have what the `training` package needs
_TRAINING = "/opt/tpu-launch/training"  # as in images/*/Dockerfile
BASE_TARGET = "platform"
_CLOUD_BUILD_SECONDS = 3600


@dataclass(frozen=True)
class AppendSpec:
    """An image to be made: a base image, files to append, and the repository for the result."""

    base: Reference
    advice: str  # what to do when the base does not exist
    repository: str  # HOST/PATH
    training: tuple[Entry, ...]  # the trainer's package, for base images that can run it
    code: tuple[Entry, ...] = ()  # the user's own files, for the working directory
    create_repository: bool = False
    ca_bundle: Path | None = None


def find(spec: AppendSpec) -> str | None:
    """Returns REPOSITORY@sha256:... if the registry has the image, else None. Sends nothing. Raises BadInput for an
    unusable base or file, LaunchError if the registry refuses the credentials or does not answer."""
    target = parse_reference(spec.repository)
    with _open_registry(spec, target, writes=False) as registry:
        base = _read_base(registry, spec)
        trainer, code = _make_layers(spec, base)
        digest = registry.find_manifest(target.path, compute_layers_tag(trainer + code, base.digest))
    return f"{target.repository}@{digest}" if digest else None


def ensure(spec: AppendSpec, say: Callable[[str], None]) -> Image:
    """Returns the image, named REPOSITORY@sha256:..., after making it, and its repository if `spec` says so, in the
    registry unless it exists. Raises BadInput for an unusable base or file, LaunchError if the registry fails."""
    target = parse_reference(spec.repository)
    with _open_registry(spec, target, writes=True) as registry:
        base = _read_base(registry, spec)
        trainer, code = _make_layers(spec, base)
        layers = trainer + code
        tag = compute_layers_tag(layers, base.digest)
        files = {path: found for layer in code for path, found in layer.hashes.items()}
        if digest := registry.find_manifest(target.path, tag):
            return Image(f"{target.repository}@{digest}", files, base.folder)
        if spec.create_repository and require_repository(target.repository):
            say(f"created the repository of {target.repository}: private, as the project's")
        say(f"appending {len(layers)} layer{'s' if len(layers) > 1 else ''} to {spec.base}")
        begin = time.monotonic()
        digest = _push(registry, target, tag, spec.base, base, layers)
        seconds = time.monotonic() - begin
        say(f"pushed {target.repository}:{tag}: sent {registry.bytes_sent / 2**10:,.1f} KiB in {seconds:.1f} s")
    return Image(f"{target.repository}@{digest}", files, base.folder)


def _open_registry(spec: AppendSpec, target: Reference, *, writes: bool) -> Registry:
    """Returns a session, not connected yet, with the registry of the base and the target; `writes`: to push to the
    target."""
    return Registry(
        target.host,
        find_credentials,
        writes=target.path if writes else None,
        reads=[spec.base.path, target.path],
        ca_bundle=spec.ca_bundle,
    )


def _read_base(registry: Registry, spec: AppendSpec) -> BaseImage:
    """Reads the base, for linux/amd64, in the registry. Raises BadInput if it is unusable, or missing (the message ends
    with `spec.advice`), LaunchError if the registry fails."""
    name, path = str(spec.base), spec.base.path
    document = registry.read_manifest(path, spec.base.version)
    if document is None:
        raise BadInput(f"{name} is not in the registry: {spec.advice}")
    if chosen := choose_platform(document, name):
        document = registry.require_manifest(path, chosen)
    return read_image(document, lambda digest, size: registry.read_blob(path, digest, size), name)


def _make_layers(spec: AppendSpec, base: BaseImage) -> tuple[list[Layer], list[Layer]]:
    """Returns two lists: the layers of the trainer (none if the base lacks the label of images that can run it) and of
    the user's code. Raises BadInput if both are empty, or a file can't be read or a layer is too large."""
    can_train = _LABEL in (base.settings.get("Labels") or {})
    trainer = make_layers(spec.training, _TRAINING, "tpu-launch: the trainer") if can_train else []
    code = make_layers(spec.code, base.folder, "tpu-launch: image.code")
    if not trainer + code:
        raise BadInput(f"{spec.base} has no label {_LABEL}, so there is nothing to append: set image.code")
    return trainer, code


def _push(
    registry: Registry, target: Reference, tag: str, source: Reference, base: BaseImage, layers: list[Layer]
) -> str:
    """Sends to `target` what it lacks, last the manifest, under `tag`; returns the manifest's digest. The base's layers
    are never sent: raises BadInput if the registry does not mount them from their repository, `source`. Raises
    LaunchError if a request fails."""
    if source.path != target.path:
        for layer in base.manifest["layers"]:
            if not registry.mount(target.path, layer["digest"], source=source.path):
                raise BadInput(
                    f"the registry {source.host} does not take layers of {source.repository} into another repository: "
                    "give this account the right to read it, or set image.repository to the repository of image.base"
                )
    document, config = append_layers(base, layers)
    for blob in (*(layer.blob for layer in layers), Blob(config)):
        registry.upload(target.path, blob)
    registry.write_manifest(target.path, tag, document)
    return document.digest


def base_spec(spec: ImageSpec) -> ImageSpec:
    """Returns the specification of the base of one of our own images: its Dockerfile up to the stage before the code is
    added, and only the files of the Dockerfile's folder."""
    context = build_context.tree(spec.dockerfile.parent, ignore=("Dockerfile", "*.in"))
    return replace(spec, context=context, target=BASE_TARGET)


def base_reference(spec: ImageSpec) -> Reference:
    """Returns the name REPOSITORY:base-HASH of the base of one of our own images, which need not exist; reads its files
    for the hash. Raises BadInput when `spec` has no repository."""
    if spec.repository is None:
        raise BadInput("image.repository: without it there is no registry for an image that is made without an engine")
    return parse_reference(f"{spec.repository}:base-{compute_tag(base_spec(spec), {})}")


def make_base(spec: ImageSpec, say: Callable[[str], None]) -> str:
    """Builds and pushes the base of an image as far as `ensure_image` does, tags it unless the registry has that tag,
    and returns its name. Raises BadInput without an engine (even if the registry has the base) or a repository,
    LaunchError when the build or the push failed."""
    wanted = base_reference(spec)
    engine.require_engine()
    image = ensure_image(base_spec(spec), say)
    with Registry(wanted.host, find_credentials, writes=wanted.path, ca_bundle=spec.ca_bundle) as registry:
        if registry.find_manifest(wanted.path, wanted.tag) != image.digest:
            registry.write_manifest(wanted.path, wanted.tag, registry.require_manifest(wanted.path, image.digest))
            say(f"tagged {wanted}")
    return str(wanted)


def cloud_build_commands(spec: ImageSpec, project: str) -> str:
    """Returns commands for the user's shell that build and push the base by Cloud Build; they write cloudbuild.json and
    cloudbuild/ into the current folder. Raises BadInput without a repository."""
    wanted = str(base_reference(spec))
    arguments = ["build", "--target", BASE_TARGET, "--platform", "linux/amd64", "--tag", wanted]
    for key, value in spec.build_args:
        arguments += ["--build-arg", f"{key}={value}"]
    step = {"name": "gcr.io/cloud-builders/docker", "env": ["DOCKER_BUILDKIT=1"], "args": [*arguments, "."]}
    build = {"steps": [step], "images": [wanted], "timeout": f"{_CLOUD_BUILD_SECONDS}s"}
    folder = shlex.quote(str(spec.dockerfile.parent))
    # JSON is YAML; a quoted delimiter keeps the shell from reading it. gcloud would send the links of images/ as links.
    return (
        f"cat > cloudbuild.json <<'EOF'\n{json.dumps(build, indent=2)}\nEOF\n"
        f"mkdir -p cloudbuild && cp -RL {folder}/. cloudbuild\n"
        f"gcloud builds submit cloudbuild --project={shlex.quote(project)} --config=cloudbuild.json\n"
    )
