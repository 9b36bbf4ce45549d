"""`tpu-launch doctor`: checks everything that a run needs, and names the command that mends what is missing.

Nothing is changed. A check is a function that returns rows and never raises: an error is a row. Checks run in parallel,
since most of them wait for gcloud.
"""

from __future__ import annotations

import enum
import functools
import json
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import costs, home, shell
from launcher.checks import inputs
from launcher.config import Config
from launcher.errors import CommandMissing, LaunchError
from launcher.gcloud.calls import run_gcloud
from launcher.gcloud.errors import PermissionDenied
from launcher.images import engine, local
from launcher.images.distribution import credentials
from launcher.images.distribution.client import Registry
from launcher.tpu_vm import commands, slice_hints
from training.accelerators import Api

_SECONDS = 60.0
_TESTED = "528.0.0"
_NEEDS_LOGIN = ("pkg.dev", "gcr.io")


class Verdict(enum.Enum):
    """The result of a check."""

    PASS = "PASS"
    WARN = "WARN"  # may be fine: a person decides
    FAIL = "FAIL"  # a run can't work


@dataclass(frozen=True)
class Row:
    """One result; `fix` is a command, or a sentence where no command would do."""

    check: str
    verdict: Verdict
    detail: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """The row for scripts."""
        return {"check": self.check, "verdict": self.verdict.value, "detail": self.detail, "fix": self.fix}


def examine(config: Config) -> list[Row]:
    """The results of all checks, in the order in which they should be mended."""
    checks: list[Callable[[], list[Row]]] = [
        lambda: [_cost(config)],
        lambda: old_generation_rows(config),
        _gcloud_and_account,
        *(functools.partial(_zone, zoned) for zoned in slice_hints.in_every_zone(config)),
        *(functools.partial(_runtime, zoned) for zoned in slice_hints.in_every_zone(config)),
        lambda: [quota_row(config)],
        lambda: [_ssh_key(Path.home() / ".ssh" / "google_compute_engine")],
        lambda: [_engine(config)],
        lambda: [_registry(config)],
        lambda: [examine_buckets(config)],
        lambda: [_folder()],
    ]
    with ThreadPoolExecutor(len(checks)) as pool:
        return [row for rows in pool.map(lambda check: check(), checks) for row in rows]


def failed(rows: Sequence[Row]) -> bool:
    """Whether a run can't work."""
    return any(row.verdict is Verdict.FAIL for row in rows)


def _cost(config: Config) -> Row:
    try:
        costs.check(config)
    except LaunchError as error:
        return Row("cost", Verdict.FAIL, str(error), "change slice.max_cost_per_hour, or the slice")
    price = costs.line(config)
    return Row("cost", Verdict.WARN if "unknown" in price else Verdict.PASS, price.removeprefix("cost: "))


def old_generation_rows(config: Config) -> list[Row]:
    """What is reported of the newest PyTorch/XLA on old generations: jax-ml/jax#30834, pytorch/xla#9604."""
    generation = config.accelerator.generation.name
    older = config.image.build_args.get("REQUIREMENTS") == "requirements-2.8.txt"
    if config.backend != "torch-xla" or generation not in ("v2", "v3") or (older and generation == "v3"):
        return []
    detail = f"there are reports of {generation} hosts whose chips the newest libtpu can't open"
    if generation == "v2":
        detail += ", and torch_xla's own tests leave several devices (SPMD) out on v2, because it crashes there"
    fix = "tpu-launch doctor --devices tells; if so, image.build_args: {REQUIREMENTS: requirements-2.8.txt}"
    return [Row("generation", Verdict.WARN, detail, fix)]


# -- gcloud and what it can reach --------------------------------------------------------------------------------------


def _gcloud_and_account() -> list[Row]:
    try:
        shell.find("gcloud")
        shell.find("ssh")
        info = json.loads(run_gcloud(["gcloud", "info", "--format=json", "--quiet"], timeout=_SECONDS))
    except LaunchError as error:
        fix = "https://cloud.google.com/sdk/docs/install" if isinstance(error, CommandMissing) else "gcloud info"
        return [Row("gcloud", Verdict.FAIL, str(error).splitlines()[0], fix)]
    return [version_row(info), account_row(info)]


def version_row(info: dict[str, Any]) -> Row:
    """The SDK's version against the one that was tested. `info`: `gcloud info --format=json`."""
    version = str(info.get("basic", {}).get("version", ""))
    if version == _TESTED:
        defects = "--output-directory, subsets of --worker, commands run again after exit code 255"
        return Row(
            "gcloud",
            Verdict.PASS,
            f"{version}, which this was tested with: its known defects are avoided ({defects})",
        )
    if _numbers(version) < _numbers(_TESTED):
        return Row(
            "gcloud",
            Verdict.WARN,
            f"{version} is older than {_TESTED}, the version this was tested with",
            "gcloud components update",
        )
    return Row("gcloud", Verdict.PASS, f"{version} (tested with {_TESTED}; the defects known there are avoided)")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def account_row(info: dict[str, Any]) -> Row:
    """The account that gcloud uses. `info`: `gcloud info --format=json`."""
    config = info.get("config", {})
    auth = config.get("properties", {}).get("auth", {}).get("disable_credentials", "")
    if isinstance(auth, dict):  # {"value": ..., "source": ...} in newer SDKs
        auth = auth.get("value", "")
    if str(auth).lower() == "true":
        return Row(
            "account",
            Verdict.PASS,
            "credentials are switched off (auth/disable_credentials): an emulated API needs none",
        )
    if account := config.get("account"):
        return Row("account", Verdict.PASS, str(account))
    return Row(
        "account", Verdict.FAIL, "no active account", "gcloud auth login && gcloud auth application-default login"
    )


def _zone(config: Config) -> list[Row]:
    """Project, API, zone and accelerator, by one question to the API."""
    accelerator_type = config.slice.accelerator_type
    place = f"{accelerator_type} in {config.zone}"
    try:
        offered = run_gcloud(commands.accelerator_types_command(config), timeout=_SECONDS).split()
    except LaunchError as error:
        return [Row("project, API, zone", Verdict.FAIL, str(error).splitlines()[0], _fix_of(config, error))]
    rows = [Row("project, API, zone", Verdict.PASS, f"{config.project}: the Cloud TPU API answers for {config.zone}")]
    if accelerator_type in offered:
        return [*rows, Row("accelerator", Verdict.PASS, f"{place} (capacity is known only when it is asked for)")]
    zones = ", ".join(config.accelerator.zones(Api.CLOUD_TPU))
    return [
        *rows,
        Row(
            "accelerator",
            Verdict.FAIL,
            f"no {place}; the zone has {', '.join(offered) or 'none'}",
            f"zone: one of {zones}",
        ),
    ]


def _fix_of(config: Config, error: LaunchError) -> str:
    if isinstance(error, PermissionDenied):
        text = str(error)
        if "services enable" in text:
            return f"gcloud services enable tpu.googleapis.com --project={config.project}"
        if "auth login" in text:
            return "gcloud auth login"
        return f"gcloud compute tpus locations list --project={config.project}; the account needs roles/tpu.admin"
    return str(error).splitlines()[-1].strip()


def _runtime(config: Config) -> list[Row]:
    try:
        offered = run_gcloud(commands.runtime_versions_command(config), timeout=_SECONDS).split()
    except LaunchError:
        return []  # the row of the zone says why
    if config.runtime_version in offered:
        return [Row("runtime version", Verdict.PASS, config.runtime_version)]
    fix = f"slice.runtime_version: {config.accelerator.generation.runtime_version}"
    return [Row("runtime version", Verdict.FAIL, f"{config.zone} has no runtime version {config.runtime_version}", fix)]


# How the names of quotas begin, where that is not TPU and the generation: TPUV5sLitepodPerProjectPerZoneForTPUAPI.
_QUOTA_PREFIX = {"v5e": "TPUV5s"}


def quota_row(config: Config) -> Row:
    """The quotas that the slice needs, and the command that shows them: the Cloud Quotas API, for which most accounts
    have no rights, is not asked. There is one a zone and one a region, and pods of some generations have their own."""
    generation = config.accelerator.generation.name
    begin = _QUOTA_PREFIX.get(generation, f"TPU{generation.upper()}")
    preemptible = ".*Preemptible" if config.slice.capacity == "spot" else ""
    scopes = f"the zone {config.zone} and the region {config.zone.rsplit('-', 1)[0]}"
    return Row(
        "quota",
        Verdict.WARN,
        f"not looked at: a {config.slice.accelerator_type} ({config.slice.capacity}) needs quota {begin}... for "
        f"{scopes}; `up` says at once when it lacks",
        f"gcloud beta quotas info list --service=tpu.googleapis.com --project={config.project} "
        f"--filter='quotaId~^{begin}{preemptible}.*PerProjectPer'",
    )


# -- this machine ------------------------------------------------------------------------------------------------------


def _ssh_key(path: Path) -> Row:
    """The key that gcloud uses: it must exist, be private, and work without a passphrase that somebody types."""
    if not path.exists():
        return Row(
            "ssh key",
            Verdict.WARN,
            f"{path} is not there yet: gcloud makes one at the first connection",
            f"ssh-keygen -t rsa -N '' -f {path}",
        )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return Row("ssh key", Verdict.FAIL, f"{path} can be read by others: ssh refuses it", f"chmod 600 {path}")
    try:
        if shell.run(["ssh-keygen", "-y", "-P", "", "-f", str(path)], timeout=20).ok:
            return Row("ssh key", Verdict.PASS, f"{path}, without a passphrase")
        mine = shell.run(["ssh-keygen", "-l", "-f", str(path)], timeout=20).stdout.split()[1:2]
        if mine and mine[0] in shell.run(["ssh-add", "-l"], timeout=20).stdout:
            return Row("ssh key", Verdict.PASS, f"{path}, held by the ssh agent")
    except LaunchError as error:
        return Row("ssh key", Verdict.FAIL, str(error))
    return Row(
        "ssh key",
        Verdict.FAIL,
        f"{path} asks for a passphrase (or is damaged), and nobody is there to type it",
        f"ssh-add {path}",
    )


def _engine(config: Config) -> Row:
    try:
        docker = engine.require_engine()
    except LaunchError as error:
        if config.image.reference:
            return Row("container engine", Verdict.PASS, "none, and none is needed: image.reference is given")
        if not local.needs_engine(config):
            return Row("container engine", Verdict.PASS, "none, and none is needed: the image is made in the registry")
        fix = "systemctl start docker (Debian: apt-get install docker.io; macOS: Docker Desktop)"
        if config.image.repository is None and config.image.build == "auto":
            fix += "; or give image.repository, where the image is then made without an engine"
        return Row("container engine", Verdict.FAIL, str(error).splitlines()[0], fix)
    return Row("container engine", Verdict.PASS, f"{docker} builds with BuildKit, and its engine answers")


def _registry(config: Config) -> Row:
    if config.image.repository is None:
        if config.image.reference:
            return Row("registry", Verdict.PASS, "not pushed to: image.reference is given")
        return Row(
            "registry",
            Verdict.WARN,
            "image.repository is not given: only emulated hosts have this machine's images",
            f"image.repository: REGION-docker.pkg.dev/{config.project}/REPOSITORY/NAME",
        )
    if not local.needs_engine(config):
        return base_image_row(config)
    host = config.image.repository.split("/")[0]
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        settings = {}
    return registry_row(host, settings)


def base_image_row(config: Config) -> Row:
    """Whether the registry lets us in and has the base that an image without an engine is appended to."""
    try:
        spec = local.append_spec(config)
        with Registry(spec.base.host, credentials.find, reads=[spec.base.path], ca_bundle=spec.ca_bundle) as registry:
            found = registry.find_manifest(spec.base.path, spec.base.version)
    except LaunchError as error:
        return Row("registry", Verdict.FAIL, str(error).splitlines()[0], "gcloud auth login, or docker login")
    if found is None:
        return Row("registry", Verdict.FAIL, f"{spec.base} is not there", spec.advice)
    return Row("registry", Verdict.PASS, f"has the base image {spec.base}")


def registry_row(host: str, settings: dict[str, Any]) -> Row:
    """Whether docker has credentials for that registry. `settings`: docker's config.json."""
    for kind in ("credHelpers", "auths"):
        if host in settings.get(kind, {}):
            return Row("registry", Verdict.PASS, f"docker has credentials for {host} ({kind})")
    if settings.get("credsStore"):
        return Row(
            "registry",
            Verdict.WARN,
            f"docker asks {settings['credsStore']} for {host}; whether it has an answer is not looked at",
        )
    if host.endswith(_NEEDS_LOGIN):
        return Row(
            "registry",
            Verdict.FAIL,
            f"docker has no credentials for {host}",
            f"gcloud auth configure-docker {host} --quiet",
        )
    return Row("registry", Verdict.WARN, f"docker has no credentials for {host}", f"docker login {host}")


def examine_buckets(config: Config) -> Row:
    """Whether the buckets that the file names are there, as far as this account may see."""
    if config.trainer is None:
        return Row("buckets", Verdict.PASS, "the file names none")
    unknown: list[str] = []
    try:
        inputs.buckets(config, unknown.append)
    except LaunchError as error:
        text, _, fix = str(error).partition(": create it with ")
        return Row("buckets", Verdict.FAIL, text, fix)
    if unknown:
        return Row("buckets", Verdict.WARN, "; ".join(unknown), "have roles/storage.objectViewer on it, to be sure")
    return Row("buckets", Verdict.PASS, "every bucket that the file names is there")


def _folder() -> Row:
    try:
        path = home.home()
    except LaunchError as error:
        return Row("folder", Verdict.FAIL, str(error))
    if not os.access(path, os.W_OK):
        return Row("folder", Verdict.FAIL, f"{path} can't be written", "set TPU_LAUNCH_HOME to a folder you can write")
    return Row("folder", Verdict.PASS, str(path))
