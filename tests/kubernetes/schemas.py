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


def whole_definition(name: str) -> list[dict[str, Any]]:
    """The versions of a definition as published, unreduced; empty where it is not present."""
    path = DEFINITIONS / f"{name}.yaml"
    return _versions(path) if path.exists() else []


def _builtin(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


@functools.cache
def custom() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The kept schemas by group, version and kind."""
    found = {}
    for name in CUSTOM:
        for version in json.loads((HERE / f"{name}.json").read_text()):
            found[version["group"], version["version"], version["kind"]] = version["schema"]
    return found


def _custom(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft7Validator(strict(schema))
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(document)]


def strict(schema: Any) -> Any:
    """An OpenAPI schema as JSON schema in which unnamed fields are errors, as in the API server's strict validation."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    properties = schema.get("properties")
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(properties, dict) and schema.get("type") == "object" and not is_open:
        result.setdefault("additionalProperties", False)
    return result


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
    kept = [{**version, "schema": _without_prose(version["schema"])} for version in versions]
    for version in kept:
        if version["kind"] == "JobSet":
            jobs = version["schema"]["properties"]["spec"]["properties"]["replicatedJobs"]
            template = jobs["items"]["properties"]["template"]
            template["properties"]["spec"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            template["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return kept


def _without_prose(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_prose(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_prose(value)
        for key, value in schema.items()
        if not (key == "description" and isinstance(value, str)) and key != "x-kubernetes-validations"
    }


if __name__ == "__main__":
    for each in CUSTOM:
        text = json.dumps(reduce(_versions(Path(sys.argv[1]) / f"{each}.yaml")), separators=(",", ":"), sort_keys=True)
        (HERE / f"{each}.json").write_text(text + "\n")
