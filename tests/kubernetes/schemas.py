"""The schemas by which a cluster judges our objects: Kubernetes' own, and those of JobSet and Kueue.

Built-in kinds are validated by the package kubernetes-validate, strictly (unknown fields are errors). The custom ones
were derived from the published custom resource definitions, Apache-2.0, by `reduce` below and are kept beside this
file:
    jobset-v0.12.0.json                    https://github.com/kubernetes-sigs/jobset
    kueue-{clusterqueues,localqueues,resourceflavors}-v0.19.2.json    https://github.com/kubernetes-sigs/kueue
Left out of them are descriptions, rules in CEL, and JobSet's copy of the Job's template, in whose place the Job's own
schema is used. To make them again: python -m tests.kubernetes.schemas FOLDER-WITH-THE-DEFINITIONS
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

HERE = Path(__file__).resolve().parent
DEFINITIONS = HERE.parents[2] / "shared" / "data" / "crds"  # the whole ones, where they are present
KUBERNETES = "1.32"
CUSTOM = ("jobset-v0.12.0", "kueue-clusterqueues-v0.19.2", "kueue-localqueues-v0.19.2", "kueue-resourceflavors-v0.19.2")


def mistakes(document: dict[str, Any]) -> list[str]:
    """What a cluster that has JobSet and Kueue would refuse in a document; a line each."""
    group, _, version = document["apiVersion"].rpartition("/")
    if (group, version, document["kind"]) not in custom():
        return _builtin(document)
    found = _custom(document, custom()[group, version, document["kind"]])
    if document["kind"] == "JobSet":
        for each in document["spec"]["replicatedJobs"]:
            metadata = {"name": "x", **each["template"].get("metadata", {})}
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
            of_job = _builtin({**job, "spec": each["template"]["spec"]})
            found += [f"replicatedJobs {each['name']}: {mistake}" for mistake in of_job]
    return found


def _builtin(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


@functools.cache
def custom() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The kept schemas by group, version and kind."""
    kept = [version for name in CUSTOM for version in json.loads((HERE / f"{name}.json").read_text())]
    return {(version["group"], version["version"], version["kind"]): version["schema"] for version in kept}


def _custom(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft7Validator(_mapped(schema, _closed))
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(document)]


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Applies a change to every object in a schema, inner ones first."""
    if isinstance(schema, list):
        return [_mapped(each, change) for each in schema]
    return (
        change({key: _mapped(value, change) for key, value in schema.items()}) if isinstance(schema, dict) else schema
    )


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Makes unnamed fields errors, as the API server's strict validation does."""
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("type") != "object"
    has_names = isinstance(schema.get("properties"), dict) and not is_open
    return {"additionalProperties": False, **schema} if has_names else schema


def _versions(path: Path) -> list[dict[str, Any]]:
    """Group, version, kind and schema of every served version; metadata as every object may have it."""
    documents = yaml.safe_load_all(path.read_text())
    definition = next(each for each in documents if each and each["kind"] == "CustomResourceDefinition")
    names = {key: {"type": "string"} for key in ("name", "namespace")}
    maps = {key: {"type": "object", "additionalProperties": {"type": "string"}} for key in ("labels", "annotations")}
    found = []
    for version in definition["spec"]["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        schema["properties"]["metadata"] = {"type": "object", "properties": {**names, **maps}}
        group, kind = definition["spec"]["group"], definition["spec"]["names"]["kind"]
        found.append({"group": group, "version": version["name"], "kind": kind, "schema": schema})
    return found


def reduce(versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is kept of a definition."""
    kept = [{**version, "schema": _mapped(version["schema"], _without_prose)} for version in versions]
    for version in kept:
        if version["kind"] == "JobSet":
            jobs = version["schema"]["properties"]["spec"]["properties"]["replicatedJobs"]
            template = jobs["items"]["properties"]["template"]["properties"]
            template["spec"] = template["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return kept


def _without_prose(schema: dict[str, Any]) -> dict[str, Any]:
    left_out = {"x-kubernetes-validations", *(["description"] if isinstance(schema.get("description"), str) else [])}
    return {key: value for key, value in schema.items() if key not in left_out}


if __name__ == "__main__":
    for each in CUSTOM:
        text = json.dumps(reduce(_versions(Path(sys.argv[1]) / f"{each}.yaml")), separators=(",", ":"), sort_keys=True)
        (HERE / f"{each}.json").write_text(text + "\n")
