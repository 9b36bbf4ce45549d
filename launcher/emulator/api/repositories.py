"""The calls of Artifact Registry that `gcloud artifacts repositories describe|create` makes: functions of the state."""

from typing import Any

from launcher.emulator.api import catalogue
from launcher.emulator.api.catalogue import ApiError, bad_request
from launcher.emulator.state import EmulatorState


def concerns(segments: list[str]) -> bool:
    """Returns whether a path is v1/projects/P/locations/L/repositories[/R]."""
    return [segments[0], *segments[3:6:2]] == ["v1", "locations", "repositories"] and len(segments) in (6, 7)


def answer(
    state: EmulatorState, method: str, segments: list[str], query: dict[str, str], body: dict[str, Any]
) -> dict[str, Any]:
    """Describes or creates a repository; other calls are not found. Returns the response's JSON. Raises ApiError."""
    parent = "/".join(segments[1:6])
    match (method, segments[6:]):
        case ("GET", [name]):
            repository = state.repositories.get(f"{parent}/{name}")
            if repository is None:
                raise ApiError(catalogue.NOT_FOUND, "Requested entity was not found.")
            return repository
        case ("POST", []):
            name = f"{parent}/{query.get('repositoryId', '')}"
            if body.get("format") != "DOCKER":
                raise bad_request("format: only DOCKER repositories are emulated")
            if name in state.repositories:
                raise ApiError(catalogue.ALREADY_EXISTS, "the repository already exists")
            state.repositories[name] = {"name": name, "format": "DOCKER", "description": body.get("description", "")}
            operation = f"{'/'.join(segments[1:5])}/operations/{name.rsplit('/', 1)[1]}"
            return {"name": operation, "done": True, "response": state.repositories[name]}
    raise ApiError(catalogue.NOT_FOUND, f"{method} is not emulated for repositories")


def is_missing(state: EmulatorState, repository: str) -> bool:
    """Returns whether an injected "repository" fault demands that repositories are created first, and that of the image
    LOCATION-docker.pkg.dev/PROJECT/NAME/IMAGE was not."""
    host, project, name = [*repository.split("/"), "", ""][:3]
    full_name = f"projects/{project}/locations/{host.removesuffix('-docker.pkg.dev')}/repositories/{name}"
    return full_name not in state.repositories and any(fault.kind == "repository" for fault in state.faults)
