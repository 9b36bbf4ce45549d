"""The base image of images that are made without a container engine: our own image without the code, in a registry.

Its tag is a hash of the Dockerfile, the lock files and the build arguments, so that every machine finds the same base.
It is made once, with an engine or by Cloud Build.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace

from launcher.errors import BadInput
from launcher.images import build_context, engine
from launcher.images.build import ensure_image
from launcher.images.distribution import credentials
from launcher.images.distribution.client import Registry
from launcher.images.distribution.reference import Reference, parse
from launcher.images.specification import ImageSpec, compute_tag

TARGET = "platform"
_CLOUD_BUILD_SECONDS = 3600


def base_spec(spec: ImageSpec) -> ImageSpec:
    """Returns the specification of the base of one of our own images: its Dockerfile up to the stage with the code."""
    context = build_context.tree(spec.dockerfile.parent, ignore=("Dockerfile", "*.in"))
    return replace(spec, context=context, target=TARGET)


def reference_of(spec: ImageSpec) -> Reference:
    """Returns the name of the base of one of our own images. Raises BadInput when `spec` has no repository."""
    if spec.repository is None:
        raise BadInput("image.repository: without it there is no registry for an image that is made without an engine")
    return parse(f"{spec.repository}:base-{compute_tag(base_spec(spec), {})}")


def make(spec: ImageSpec, say: Callable[[str], None]) -> str:
    """Builds the base of an image unless this machine's engine has it, pushes and tags it unless the registry has it,
    and returns its name. Raises BadInput without an engine (even if the registry has the base) or a repository,
    LaunchError when the build or the push failed."""
    wanted = reference_of(spec)
    engine.require_engine()
    image = ensure_image(base_spec(spec), say)
    with Registry(wanted.host, credentials.find, writes=wanted.path, ca_bundle=spec.ca_bundle) as registry:
        if registry.find_manifest(wanted.path, wanted.tag) != image.digest:
            registry.write_manifest(wanted.path, wanted.tag, registry.require_manifest(wanted.path, image.digest))
            say(f"tagged {wanted}")
    return str(wanted)


def cloud_build_commands(spec: ImageSpec, project: str) -> str:
    """Returns shell commands that make the base by Cloud Build. Raises BadInput when `spec` has no repository."""
    wanted = str(reference_of(spec))
    arguments = ["build", "--target", TARGET, "--platform", "linux/amd64", "--tag", wanted]
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
