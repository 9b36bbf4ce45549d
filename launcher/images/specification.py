"""The specification of an image, and the tag that follows from it.

The tag is a hash of the build context, the Dockerfile, the build arguments, the target stage and the base images' ids:
when nothing changed, nothing is built and nothing is pushed. A CA bundle does not count: it reaches the build as a
secret and enters no layer. Pure, apart from reading files.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import training
from launcher.errors import BadInput
from launcher.images import build_context
from launcher.images.build_context import Entry
from launcher.installation import metadata_file, shared_folder
from training.registry import BACKENDS

_BYTE_CODE = ("**/__pycache__", "**/*.pyc")


@dataclass(frozen=True)
class ImageSpec:
    """What an image is built from, and where it goes."""

    name: str  # its repository in the local store
    dockerfile: Path
    context: tuple[Entry, ...]
    build_args: tuple[tuple[str, str], ...] = ()
    target: str | None = None  # the Dockerfile's stage; None: the last one
    repository: str | None = None  # where it is pushed to; None: nowhere
    ca_bundle: Path | None = None  # certificates for the build's downloads
    create_repository: bool = False

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """The hashes of the context (`build_context.hash_files`) when they were first asked for: the image has these
        files, because a build compares its copy of them with this one. Raises BadInput for a file that can't be
        read."""
        return build_context.hash_files(self.context)


def default_spec(
    backend: str,
    *,
    build_args: Mapping[str, str] = {},
    ca_bundle: Path | None = None,
    target: str | None = None,
    code: Path | None = None,
) -> ImageSpec:
    """Returns our own image for a backend: images/<backend>, the `training` package of this installation, and the files
    of `code`, a user's folder (None: nothing), for the image's working directory. The Dockerfile is one for all
    backends, whose argument FRAMEWORK names the backend. `target`: the stage to build (None: the last); `ca_bundle`:
    certificates for the build's downloads, else those of TPU_LAUNCH_CA_BUNDLE. Raises BadInput for an unknown backend,
    or a folder or bundle that is missing or empty; LaunchError if this installation has no images."""
    source = shared_folder("images") / backend
    if backend not in BACKENDS:
        raise BadInput(f"there is no image for backend {backend!r}; there are: {', '.join(BACKENDS)}")
    # The Dockerfile copies the folder `code`, so it must hold a file.
    own_code = own_files(code) if code else ((".none", Path(training.__path__[0]) / "__init__.py"),)
    context = (
        # Images share a file by a link, in whose place the build gets the file.
        *((path, file.resolve()) for path, file in build_context.tree(source, ignore=("Dockerfile", "*.in"))),
        *((f"training/{path}", file) for path, file in training_files()),
        *((f"code/{path}", file) for path, file in own_code),
    )
    name, dockerfile = f"tpu-launch/{backend}", source / "Dockerfile"
    arguments = tuple(sorted({**build_args, "FRAMEWORK": backend}.items()))
    return ImageSpec(name, dockerfile, context, arguments, target, ca_bundle=_require_ca_bundle(ca_bundle))


def launcher_spec(repository: str | None = None) -> ImageSpec:
    """Returns the image of the launcher itself: images/launcher, and the packages of this installation. `repository`:
    to be pushed to; None: nowhere. Raises BadInput if the bundle of TPU_LAUNCH_CA_BUNDLE is missing; LaunchError if
    this installation lacks files."""
    source = shared_folder("images") / "launcher"
    package = build_context.tree(Path(__file__).parents[1], ignore=_BYTE_CODE)
    context = (
        *build_context.tree(source, ignore=("Dockerfile",)),
        *((f"launcher/{path}", file) for path, file in package),
        *((f"training/{path}", file) for path, file in training_files()),
        ("METADATA", metadata_file()),
    )
    name, dockerfile = "tpu-launch/launcher", source / "Dockerfile"
    return ImageSpec(name, dockerfile, context, repository=repository, ca_bundle=_require_ca_bundle(None))


def training_files() -> tuple[Entry, ...]:
    """Returns the files of this installation's `training` package, without byte code."""
    return build_context.tree(Path(training.__path__[0]), ignore=_BYTE_CODE)


def own_files(code: Path) -> tuple[Entry, ...]:
    """Returns the files of a user's folder for an image. Raises BadInput when it is missing or has no files."""
    files = build_context.folder(code)
    if not files:
        raise BadInput(f"image.code: {code} has no files for an image")
    return files


def folder_spec(
    name: str,
    folder: Path,
    *,
    dockerfile: Path | None = None,
    build_args: Mapping[str, str] = {},
    ca_bundle: Path | None = None,
) -> ImageSpec:
    """Returns the image, locally named `name`, of a user's folder and its Dockerfile (or `dockerfile`, a path
    anywhere). Raises BadInput if folder, Dockerfile or CA bundle is missing."""
    dockerfile = dockerfile or folder / "Dockerfile"
    if not dockerfile.is_file():
        raise BadInput(f"{dockerfile}: there is no such Dockerfile")
    context = build_context.folder(folder, dockerfile)
    arguments = tuple(sorted(build_args.items()))
    return ImageSpec(name, dockerfile, context, arguments, ca_bundle=_require_ca_bundle(ca_bundle))


def base_images(spec: ImageSpec) -> tuple[str, ...]:
    """Returns the images from which the Dockerfile's stages start. Raises BadInput when it can't be read."""
    try:
        text = spec.dockerfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{spec.dockerfile}: can't be read: {error}") from None
    return parse_bases(text, dict(spec.build_args))


_REFERENCE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")  # of a build argument
# An instruction and the lines of its input, which are no instructions.
_HEREDOC = re.compile(
    r"^([ \t]*(?:RUN|COPY|ADD)\b.*(?<!<)<<-?[\"']?(\w+).*)\n(?:.*\n)*?[ \t]*\2[ \t]*$", re.IGNORECASE | re.MULTILINE
)


def parse_bases(dockerfile: str, build_args: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the images from which the stages of a Dockerfile (its text) start, without scratch and earlier stages.
    Substitutes arguments that are declared before the first FROM, by `build_args` or their defaults."""
    values: dict[str, str] = {}
    stages: set[str] = set()
    bases: dict[str, None] = {}

    def expand(reference: re.Match[str]) -> str:
        """Returns the value of a build argument, or the reference's own default, or ""."""
        return values.get(reference[1] or reference[3]) or reference[2] or ""

    text = re.sub(r"^[ \t]*#.*\n", "", dockerfile, flags=re.MULTILINE)  # comments: no line goes on in the next
    text = _HEREDOC.sub(r"\1", re.sub(r"\\[ \t]*\n", " ", text))
    for line in text.splitlines():
        words = [word for word in line.split() if not word.startswith("--")]
        match [words[0].upper(), *words[1:]] if words else []:
            case ["ARG", *declarations] if not bases:
                for key, _, value in (declaration.partition("=") for declaration in declarations):
                    values[key] = build_args.get(key, _REFERENCE.sub(expand, value.strip("\"'")))
            case ["FROM", image, *alias]:
                image = _REFERENCE.sub(expand, image)
                if image.lower() not in stages and image != "scratch":
                    bases[image] = None
                if len(alias) == 2:
                    stages.add(alias[1].lower())
    return tuple(bases)


def compute_tag(spec: ImageSpec, base_ids: Mapping[str, str]) -> str:
    """Reads the files (of the context, once for each spec), and returns 16 hexadecimal digits: a hash of the context,
    the Dockerfile, arguments and target of the spec, and of the base images' ids by name. Raises BadInput for a file of
    the context that can't be read, OSError for the Dockerfile."""
    parts = (
        spec.hashes,
        hashlib.sha256(spec.dockerfile.read_bytes()).hexdigest(),
        sorted(spec.build_args),
        spec.target,
        sorted(base_ids.items()),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _require_ca_bundle(given: Path | None) -> Path | None:
    """Returns the absolute path of the given CA bundle, else of TPU_LAUNCH_CA_BUNDLE, else None. Raises BadInput if it
    is missing."""
    variable = os.environ.get("TPU_LAUNCH_CA_BUNDLE")
    path = given or (Path(variable) if variable else None)
    if path and not path.is_file():
        raise BadInput(f"{path}: there is no such CA bundle" + ("" if given else " (from TPU_LAUNCH_CA_BUNDLE)"))
    return path.absolute() if path else None
