"""`tpu-launch doctor`: checks everything that a run needs, and names the command that fixes what is missing.

Changes nothing but to create the launcher's folder. A check returns findings and never raises: an error is a finding.
Checks run in parallel, because most of them wait for gcloud.
"""

import functools
import json
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher import costs, home, shell
from launcher.checks import inputs
from launcher.config import Config
from launcher.errors import BadInput, CommandMissing, LaunchError
from launcher.gcloud import PermissionDenied, run_gcloud
from launcher.images import engine, local
from launcher.images.registry import Registry
from launcher.images.repositories import find_credentials, is_google
from launcher.tpu_vm import commands, slice_hints
from training.accelerators import Api

_SECONDS = 60.0
_TESTED = "528.0.0"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    where: str  # the thing that was checked: "ssh key", "quota"
    severity: Literal["PASS", "WARN", "FAIL"]  # WARN: the user decides; FAIL: a run can't work
    message: str
    fix: str = ""  # the remedy: a command, or a sentence where no command would do

    @property
    def fatal(self) -> bool:
        return self.severity == "FAIL"


def ok(where: str, message: str) -> Finding:
    return Finding(where, "PASS", message)


def warning(where: str, message: str, fix: str = "") -> Finding:
    return Finding(where, "WARN", message, fix)


def failure(where: str, message: str, fix: str = "") -> Finding:
    return Finding(where, "FAIL", message, fix)


def examine(config: Config) -> list[Finding]:
    """Runs all checks at once, those of zone and runtime for each place of a candidate; returns findings in the order
    in which to fix them. Creates the launcher's folder."""
    checks: list[Callable[[], list[Finding]]] = [
        lambda: [_cost(config)],
        lambda: old_generation_findings(config),
        _gcloud_and_account,
        *(functools.partial(_zone, zoned) for zoned in slice_hints.in_every_place(config)),
        *(functools.partial(_runtime, zoned) for zoned in slice_hints.in_every_place(config)),
        lambda: [check_quota(config)],
        lambda: [_ssh_key(Path.home() / ".ssh" / "google_compute_engine")],
        lambda: [_engine(config)],
        lambda: [_registry(config)],
        lambda: [check_buckets(config)],
        lambda: [_folder()],
    ]
    with ThreadPoolExecutor(len(checks)) as pool:
        return [row for rows in pool.map(lambda check: check(), checks) for row in rows]


def _cost(config: Config) -> Finding:
    """Checks the hourly cost, of slice.candidates the first within them, against its limits in `slice`; without limits,
    warns of an unknown price."""
    refusals = []
    for placed in map(config.placed, config.candidates) if config.slice.candidates else [config]:
        try:
            costs.check(placed)
        except LaunchError as error:
            refusals.append(str(error))
        else:
            price = costs.line(placed)
            return (warning if "unknown" in price else ok)("cost", price.removeprefix("cost: "))
    return failure("cost", refusals[0], "raise that limit, or change the slice")


def old_generation_findings(config: Config) -> list[Finding]:
    """Returns a warning for torch_xla on v2, and newer than 2.8 on v3 (jax-ml/jax#30834, pytorch/xla#9604); else []."""
    generation = config.accelerator.generation.name
    older = config.image.build_args.get("REQUIREMENTS") == "requirements-2.8.txt"
    if config.backend != "torch-xla" or generation not in ("v2", "v3") or (older and generation == "v3"):
        return []
    detail = f"there are reports of {generation} hosts whose chips the newest libtpu can't open"
    if generation == "v2":
        detail += ", and torch_xla's own tests leave several devices (SPMD) out on v2, because it crashes there"
    fix = "tpu-launch doctor --devices tells; if so, image.build_args: {REQUIREMENTS: requirements-2.8.txt}"
    return [warning("generation", detail, fix)]


# -- gcloud and what it can reach --------------------------------------------------------------------------------------


def _gcloud_and_account() -> list[Finding]:
    """Returns one failure if gcloud or ssh is missing, or gcloud gives no answer in 60 s; else what `check_version` and
    `check_account` find."""
    try:
        shell.find("gcloud")
        shell.find("ssh")
        info = json.loads(run_gcloud(["gcloud", "info", "--format=json", "--quiet"], timeout=_SECONDS))
    except LaunchError as error:
        fix = "https://cloud.google.com/sdk/docs/install" if isinstance(error, CommandMissing) else "gcloud info"
        return [failure("gcloud", str(error).splitlines()[0], fix)]
    return [check_version(info), check_account(info)]


def check_version(info: dict[str, Any]) -> Finding:
    """Returns a warning if gcloud is older than the tested version, else a pass. `info`: gcloud info --format=json."""
    version = str(info.get("basic", {}).get("version", ""))
    if version == _TESTED:
        defects = "--output-directory, subsets of --worker, commands run again after exit code 255"
        return ok("gcloud", f"{version}, which this was tested with: its known defects are avoided ({defects})")
    if _numbers(version) < _numbers(_TESTED):
        message = f"{version} is older than {_TESTED}, the version this was tested with"
        return warning("gcloud", message, "gcloud components update")
    return ok("gcloud", f"{version} (tested with {_TESTED}; the defects known there are avoided)")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns "528.0.0" as (528, 0, 0); leaves out parts that are no numbers."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def check_account(info: dict[str, Any]) -> Finding:
    """Checks that gcloud has an active account. `info`: output of `gcloud info --format=json`."""
    if account := info.get("config", {}).get("account"):
        return ok("account", str(account))
    return failure("account", "no active account", "gcloud auth login && gcloud auth application-default login")


def _zone(config: Config) -> list[Finding]:
    """Asks the API once which accelerator types the zone has. Returns one failure if it gives no answer; else that
    project, API and zone are right, and whether the slice's type is among them."""
    accelerator_type = config.slice.accelerator_type
    place = f"{accelerator_type} in {config.zone}"
    try:
        offered = run_gcloud(commands.offers_command(config, "accelerator-types"), timeout=_SECONDS).split()
    except LaunchError as error:
        return [failure("project, API, zone", str(error).splitlines()[0], _fix_of(config, error))]
    answers = ok("project, API, zone", f"{config.project}: the Cloud TPU API answers for {config.zone}")
    if accelerator_type in offered:
        return [answers, ok("accelerator", f"{place} (capacity shows only when the slice is created)")]
    zones = ", ".join(config.accelerator.zones(Api.CLOUD_TPU))
    message = f"no {place}; the zone has {', '.join(offered) or 'none'}"
    return [answers, failure("accelerator", message, f"zone: one of {zones}")]


def _fix_of(config: Config, error: LaunchError) -> str:
    """Returns what the user does about an error: for a denied permission, the command that turns the API on or logs in,
    else one that tests the permission, with the role it needs; for another error, as of a project without billing, its
    message's last line."""
    text = str(error)
    if isinstance(error, PermissionDenied) and "(Billing)" not in text:
        if "services enable" in text:
            return f"gcloud services enable tpu.googleapis.com --project={config.project}"
        if "auth login" in text:
            return "gcloud auth login"
        return f"gcloud compute tpus locations list --project={config.project}; the account needs roles/tpu.admin"
    return text.splitlines()[-1].strip()


def _runtime(config: Config) -> list[Finding]:
    """Checks that the zone has the runtime version. Returns [] if the API fails, which `_zone` reports."""
    try:
        offered = run_gcloud(commands.offers_command(config, "versions"), timeout=_SECONDS).split()
    except LaunchError:
        return []  # the row of the zone says why
    if config.runtime_version in offered:
        return [ok("runtime version", config.runtime_version)]
    fix = f"slice.runtime_version: {config.accelerator.generation.runtime_version}"
    return [failure("runtime version", f"{config.zone} has no runtime version {config.runtime_version}", fix)]


# How the names of quotas begin, where that is not TPU and the generation: TPUV5sLitepodPerProjectPerZoneForTPUAPI.
_QUOTA_PREFIX = {"v5e": "TPUV5s"}


def check_quota(config: Config) -> Finding:
    """Checks nothing: returns a warning that names the quotas that the slice needs, one a zone and one a region, and
    the command that shows them, because most accounts have no rights for the Cloud Quotas API."""
    generation = config.accelerator.generation.name
    begin = _QUOTA_PREFIX.get(generation, f"TPU{generation.upper()}")
    preemptible = ".*Preemptible" if config.slice.capacity == "spot" else ""
    scopes = f"the zone {config.zone} and the region {config.zone.rsplit('-', 1)[0]}"
    return warning(
        "quota",
        f"not checked: a {config.slice.accelerator_type} ({config.slice.capacity}) needs quota {begin}... for "
        f"{scopes}; `up` says at once when it lacks",
        f"gcloud beta quotas info list --service=tpu.googleapis.com --project={config.project} "
        f"--filter='quotaId~^{begin}{preemptible}.*PerProjectPer'",
    )


# -- this machine ------------------------------------------------------------------------------------------------------


def _ssh_key(path: Path) -> Finding:
    """Checks that gcloud's key is private, without a passphrase or held by the ssh agent; warns if it is missing."""
    if not path.exists():
        message = f"{path} does not exist yet: gcloud makes one at the first connection"
        return warning("ssh key", message, f"ssh-keygen -t rsa -N '' -f {path}")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return failure("ssh key", f"{path} can be read by others: ssh refuses it", f"chmod 600 {path}")
    try:
        if shell.run(["ssh-keygen", "-y", "-P", "", "-f", str(path)], timeout=20).ok:
            return ok("ssh key", f"{path}, without a passphrase")
        mine = shell.run(["ssh-keygen", "-l", "-f", str(path)], timeout=20).stdout.split()[1:2]
        if mine and mine[0] in shell.run(["ssh-add", "-l"], timeout=20).stdout:
            return ok("ssh key", f"{path}, held by the ssh agent")
    except LaunchError as error:
        return failure("ssh key", str(error))
    message = f"{path} asks for a passphrase (or is damaged), which `tpu-launch` can't type"
    return failure("ssh key", message, f"ssh-add {path}")


def _engine(config: Config) -> Finding:
    """Checks that a container engine can build the image; none is fine where none is needed."""
    try:
        docker = engine.require_engine()
    except LaunchError as error:
        if config.image.reference:
            return ok("container engine", "none, and none is needed: image.reference is given")
        if not local.needs_engine(config):
            return ok("container engine", "none, and none is needed: the image is made in the registry")
        fix = "systemctl start docker (Debian: apt-get install docker.io; macOS: Docker Desktop)"
        if config.image.repository is None and config.image.build == "auto":
            fix += "; or give image.repository, where the image is then made without an engine"
        return failure("container engine", str(error).splitlines()[0], fix)
    return ok("container engine", f"{docker} builds with BuildKit, and its engine answers")


def _registry(config: Config) -> Finding:
    """Checks docker's credentials, or the base image if no engine is needed. Passes for a given image
    (image.reference). Without image.repository warns, or fails if the image is to be made in the registry."""
    if config.image.reference:
        return ok("registry", "not pushed to: image.reference is given")
    if config.image.repository is None:
        fix = f"image.repository: REGION-docker.pkg.dev/{config.project}/REPOSITORY/NAME"
        if not local.needs_engine(config):
            return failure("registry", "image.repository is not given, and the image is made in the registry", fix)
        message = "image.repository is not given: only emulated hosts have this machine's images"
        return warning("registry", message, fix)
    if not local.needs_engine(config):
        return check_base_image(config)
    host = config.image.repository.split("/")[0]
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        settings = {}
    return check_registry(host, settings)


def check_base_image(config: Config) -> Finding:
    """Checks that the registry admits us and has the base image to which a build without an engine appends."""
    try:
        spec = local.append_spec(config)
    except BadInput as error:
        return failure("registry", str(error).splitlines()[0], f"correct the section image of {config.document.name}")
    try:
        with Registry(spec.base.host, find_credentials, reads=[spec.base.path], ca_bundle=spec.ca_bundle) as registry:
            found = registry.find_manifest(spec.base.path, spec.base.version)
    except LaunchError as error:
        return failure("registry", str(error).splitlines()[0], "gcloud auth login, or docker login")
    if found is None:
        return failure("registry", f"{spec.base} does not exist", spec.advice)
    return ok("registry", f"has the base image {spec.base}")


def check_registry(host: str, settings: dict[str, Any]) -> Finding:
    """Looks in docker's config.json (`settings`) for credentials of a registry: passes with its own, warns with a store
    of credentials, which is not asked; without any, fails for Google's registries and warns for others."""
    for kind in ("credHelpers", "auths"):
        if host in settings.get(kind, {}):
            return ok("registry", f"docker has credentials for {host} ({kind})")
    if store := settings.get("credsStore"):
        return warning("registry", f"docker asks {store} for {host}; whether it has an answer is not checked")
    message = f"docker has no credentials for {host}"
    if is_google(host):
        return failure("registry", message, f"gcloud auth configure-docker {host} --quiet")
    return warning("registry", message, f"docker login {host}")


def check_buckets(config: Config) -> Finding:
    """Checks that the buckets of `output` and `data` exist; warns of unreadable ones, or else of those whose data costs
    dollars on the way to the slice's region. Fails too if Cloud Storage does not answer."""
    if config.trainer is None:
        return ok("buckets", "the file names none")
    unknown: list[str] = []
    far: list[str] = []
    try:
        inputs.buckets(config, unknown.append, far.append)
    except LaunchError as error:
        text, _, fix = str(error).partition(": create it with ")
        return failure("buckets", text, fix)
    if unknown:
        return warning("buckets", "; ".join(unknown), "have roles/storage.objectViewer on it, to be sure")
    return warning("buckets", "; ".join(far)) if far else ok("buckets", "every bucket that the file names exists")


def _folder() -> Finding:
    """Creates the launcher's folder if it is missing, and checks that it can be written."""
    try:
        path = home.home()
    except LaunchError as error:
        return failure("folder", str(error))
    if not os.access(path, os.W_OK):
        return failure("folder", f"{path} can't be written", "set TPU_LAUNCH_HOME to a folder you can write")
    return ok("folder", str(path))
