"""Finds the credentials for a registry: gcloud's access token for Google's registries, docker's settings for others.

Credentials are neither stored nor logged. Credential helpers speak docker's protocol
(https://github.com/docker/docker-credential-helpers): the registry on standard input, JSON on standard output.
"""

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import shell
from launcher.errors import BadInput, LaunchError
from launcher.gcloud.calls import run_gcloud
from launcher.images.distribution.reference import DOCKER_HUB, is_google

_SECONDS = 60.0
_TOKEN_USER = "oauth2accesstoken"  # https://cloud.google.com/artifact-registry/docs/docker/authentication#token
_IDENTITY_USER = "<token>"  # the user name with which a helper returns an identity token


@dataclass(frozen=True, repr=False)
class RegistryCredentials:
    """A user name and a password, left out of every message and representation."""

    user: str
    password: str

    @property
    def basic(self) -> str:
        """The value of the header Authorization, or Proxy-Authorization."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find(host: str) -> RegistryCredentials | None:
    """Returns the credentials for a registry; None when there are none and requests are anonymous. Raises LaunchError
    when gcloud has no account, or a helper or docker's settings are broken."""
    if is_google(host):
        token = run_gcloud(["gcloud", "auth", "print-access-token", "--quiet"], timeout=_SECONDS).strip()
        return RegistryCredentials(_TOKEN_USER, token)
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(settings, dict), "not a JSON object"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AssertionError) as error:
        raise BadInput(f"{path}: can't be read for the credentials of {host}: {error}") from None
    return from_docker_settings(settings, host, path)


def from_docker_settings(settings: Mapping[str, Any], host: str, path: Path) -> RegistryCredentials | None:
    """Returns a registry's credentials from docker's config.json (`path`): from the registry's helper, else from the
    common store, else from the file itself; None without an entry. Raises BadInput for a damaged entry."""
    names = [host, f"https://{host}"]
    if host == DOCKER_HUB:
        names.append("https://index.docker.io/v1/")
    for name in names:
        helper = (settings.get("credHelpers") or {}).get(name) or settings.get("credsStore")
        if helper and (found := _ask_helper(str(helper), name)):
            return found
        entry = (settings.get("auths") or {}).get(name) or {}
        if encoded := entry.get("auth"):
            try:
                user, _, password = base64.b64decode(encoded).decode().partition(":")
            except ValueError:
                raise BadInput(f"{path}: the entry of {name} can't be read: `docker login {host}` again") from None
            return RegistryCredentials(user, password.rstrip("\0"))
    return None


def _ask_helper(helper: str, name: str) -> RegistryCredentials | None:
    """Runs docker-credential-HELPER for a registry; None when it has no entry. Raises LaunchError when it fails."""
    command = [f"docker-credential-{helper}", "get"]
    result = shell.run(command, timeout=_SECONDS, input=name)
    if not result.ok:
        if "not found" in (result.stdout + result.stderr).lower():
            return None
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no reason given"]
        raise LaunchError(f"{shell.quote(command)} gave no credentials for {name}: {lines[-1]}")
    try:
        answer = json.loads(result.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise LaunchError(f"{shell.quote(command)} did not answer with Username and Secret for {name}") from None
    if user == _IDENTITY_USER:
        raise BadInput(f"{shell.quote(command)} has an identity token for {name}, which is not supported: log in again")
    return RegistryCredentials(user, secret)
