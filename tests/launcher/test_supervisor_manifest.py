"""The scripts of `supervise --manifest`, run by the real gcloud and kubectl against servers that keep the requests."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from launcher.cli.main import cli
from launcher.emulator.http_server import HttpRequest, HttpResponse, json_response
from launcher.errors import BadInput
from launcher.supervisor_manifest import KINDS, SupervisorSpec, render
from tests.kubernetes.cluster.api import Api, serve
from tests.kubernetes.cluster.store import Store
from tests.servers import LoopbackServer

IMAGE = f"us-docker.pkg.dev/my-project/images/launcher@sha256:{'a' * 64}"
ACCOUNT = "tpu-launch-supervisor@my-project.iam.gserviceaccount.com"
COMMAND = ["supervise", "gs://my-bucket/runs"]
SUPERVISOR = SupervisorSpec(COMMAND[1], IMAGE, "my-project", "us-central1-a")
RULES = [{"apiGroups": ["", "apps"], "resources": ["serviceaccounts", "deployments"], "verbs": ["get", "create"]}]


class Google(LoopbackServer):
    """Google's APIs in a project without a supervisor, as far as gcloud needs them. `made`: bodies sent, by path."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        super().__init__()

    def answer(self, request: HttpRequest) -> HttpResponse:
        verb, path, body = request.method, request.path.removeprefix("http://us-central1-run.test"), request.json()
        if path.endswith(("getIamPolicy", "/iam")) and verb != "PUT":
            return json_response({"bindings": [], "etag": "YQ=="})
        if "/services/" in path:
            return json_response({"state": "ENABLED"})
        if path == "/v1/projects/my-project":
            return json_response({"projectNumber": "12345", "projectId": "my-project"})
        if verb == "GET" and (path in self.made or "/zones/us-central1-a" in path):
            return json_response(self.made.get(path, {}))
        if verb == "GET":
            return json_response({"error": {"code": 404, "message": "not found", "status": "NOT_FOUND"}}, 404)
        self.made[path] = body
        if path.endswith("/instances"):
            place = {"targetLink": f"{self.url}{path}/x", "zone": self.url + path.removesuffix("/instances")}
            return json_response({"name": "o", "operationType": "insert", "status": "DONE", **place})
        if path.endswith("/jobs"):
            body["status"] = {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True"}]}
            self.made[f"{path}/tpu-launch-supervisor"] = {**body, "metadata": {**body["metadata"], "generation": 1}}
        if path.endswith(":run"):
            body = {"metadata": {"name": "e", "namespace": "my-project"}, "spec": {}, "status": {}}
        return json_response(body.get("policy", body))

    def granted(self) -> dict[str, tuple[str, str]]:
        """Returns what was granted: the role and the member, by path."""
        policies = {path: body.get("policy", body) for path, body in self.made.items()}
        bindings = {path: policy["bindings"][0] for path, policy in policies.items() if "bindings" in policy}
        return {path: (binding["role"], *binding["members"]) for path, binding in bindings.items()}


@pytest.fixture
def google() -> Iterator[Google]:
    google = Google()
    yield google
    google.close()


def run(script: str, google: Google, folder: Path, kubeconfig: str = "") -> None:
    names = ("COMPUTE", "IAM", "CLOUDRESOURCEMANAGER", "STORAGE", "ARTIFACTREGISTRY", "SERVICEUSAGE")
    below = {"COMPUTE": "compute/v1/", "STORAGE": "storage/v1/"}
    environment = os.environ | {
        **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": f"{google.url}/{below.get(name, '')}" for name in names},
        # gcloud puts the region before the host's name, so it reaches Cloud Run through a proxy.
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_RUN": "http://run.test/",
        "http_proxy": google.url,
        "no_proxy": "127.0.0.1",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CONFIG": str(folder / "gcloud"),
        "KUBECONFIG": kubeconfig,
        "HOME": str(folder),
    }
    done = subprocess.run(["sh"], input=script, env=environment, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_each_script_grants_the_rights_and_a_vm_starts_the_container(google: Google, tmp_path: Path) -> None:
    run(render("vm", SUPERVISOR), google, tmp_path)
    permissions = google.made["/v1/projects/my-project/roles"]["role"]["includedPermissions"]
    assert {"tpu.nodes.update", "tpu.operations.get", "compute.projects.get"} < set(permissions)
    assert all(re.fullmatch(r"(tpu|compute)(\.[a-z]+){2}", name) for name in permissions)
    member, accounts = f"serviceAccount:{ACCOUNT}", "/v1/projects/my-project/serviceAccounts"
    user, reader = ("roles/iam.serviceAccountUser", member), ("roles/artifactregistry.reader", member)
    assert google.granted() == {
        "/v1/projects/my-project:setIamPolicy": ("projects/my-project/roles/tpuLaunchSupervisor", member),
        "/storage/v1/b/my-bucket/iam": ("roles/storage.objectUser", member),
        f"{accounts}/12345-compute@developer.gserviceaccount.com:setIamPolicy": user,
        "/v1/projects/my-project/locations/us/repositories/images:setIamPolicy": reader,
    }
    machine = google.made["/compute/v1/projects/my-project/zones/us-central1-a/instances"]
    assert machine["machineType"].endswith("/e2-micro")
    assert machine["serviceAccounts"][0]["email"] == ACCOUNT
    settings = yaml.safe_load(machine["metadata"]["items"][0]["value"])
    assert f"--network=host {IMAGE} {' '.join(COMMAND)}\n" in settings["write_files"][0]["content"]
    assert settings["runcmd"][-1].endswith(Path(settings["write_files"][0]["path"]).name)


def test_cloud_run_gives_a_task_a_week_and_starts_it(google: Google, tmp_path: Path) -> None:
    variables, _, start = render("cloud-run", SUPERVISOR).split("\n\n")  # without the rights, as above
    run(f"{variables}\n{start}", google, tmp_path)
    jobs = "/apis/run.googleapis.com/v1/namespaces/my-project/jobs"
    task = google.made[jobs]["spec"]["template"]["spec"]["template"]["spec"]
    assert (task["timeoutSeconds"], task["maxRetries"], task["serviceAccountName"]) == ("604800", 10, ACCOUNT)
    assert (task["containers"][0]["image"], task["containers"][0]["args"]) == (IMAGE, COMMAND)
    assert f"{jobs}/tpu-launch-supervisor:run" in google.made


def test_kubectl_applies_a_deployment_whose_pod_acts_as_the_account(google: Google, tmp_path: Path) -> None:
    store = Store()
    cluster = serve(Api(store, None, RULES))
    clusters = f"clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{cluster.server_port}'}}}}]"
    contexts = "contexts: [{name: c, context: {cluster: c, user: ''}}], current-context: c"
    (tmp_path / "kube").write_text(f"{{apiVersion: v1, kind: Config, {clusters}, {contexts}}}")
    try:
        run(render("gke", SUPERVISOR), google, tmp_path, str(tmp_path / "kube"))  # strict: unknown fields are refused
    finally:
        cluster.shutdown()
        cluster.server_close()
    account, deployment = store.all("serviceaccounts")[0], store.all("deployments")[0]
    pod = deployment["spec"]["template"]["spec"]
    assert account["metadata"]["annotations"]["iam.gke.io/gcp-service-account"] == ACCOUNT
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert (pod["containers"][0]["image"], pod["containers"][0]["args"]) == (IMAGE, COMMAND)
    identity = f"serviceAccount:my-project.svc.id.goog[default/{account['metadata']['name']}]"
    granted = google.granted()[f"/v1/projects/my-project/serviceAccounts/{ACCOUNT}:setIamPolicy"]
    assert granted == ("roles/iam.workloadIdentityUser", identity)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_prints_the_script(kind: str) -> None:
    argv = ["supervise", "--manifest", kind, "--project", "my-project", "--image", IMAGE, COMMAND[1]]
    assert CliRunner().invoke(cli, argv).output == render(kind, SUPERVISOR)


def test_what_a_script_can_not_use_is_refused() -> None:
    for name in ("my-bucket/runs", "gs://", "gs://my-bucket/$(reboot)", "gs://my-bucket/a b", "gs://my-bucket/a,b"):
        with pytest.raises(BadInput, match="gs://BUCKET/FOLDER"):
            render("vm", SupervisorSpec(name, IMAGE, "my-project", "us-central1-a"))
    tagged = ("gcr.io/p/i:1", "--manifest", "vm", "--project", "p")
    for words, why in (((IMAGE,), "--image and --project belong to --manifest"), (tagged, "leave out the tag")):
        with pytest.raises(BadInput, match=why):
            cli.main(["supervise", "--image", *words, COMMAND[1]], standalone_mode=False)
    with pytest.raises(BadInput, match="by digest"):
        render("vm", SupervisorSpec(COMMAND[1], "us-docker.pkg.dev/p/r/i:latest@", "my-project", "us-central1-a"))
