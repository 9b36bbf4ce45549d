"""Rendered manifests are valid for every size of every accelerator, k8s/ is what the code renders, every reader of YAML
gets the values that were written; configurations that GKE can't run are refused."""

import base64
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from launcher.cli.main import cli
from launcher.config import load
from launcher.errors import BadInput
from launcher.gke.manifest import LOCKED_MEMORY_KIB, RAISE_LOCKED_MEMORY, documents, render, standalone_workload
from launcher.gke.provider import Gke
from launcher.gke.templates import dump, fill
from launcher.gke.workload import check_name, host_name
from launcher.providers import this_machine
from launcher.shell import find
from tests.kubernetes import golden, schemas
from tests.kubernetes.golden import EXAMPLE, IMAGE
from tests.training.test_yaml_file import TRICKY, same
from tools import kustomize
from training.accelerators import ACCELERATORS, gke_nodes
from training.distributed.cluster import Cluster, from_environment

ON_GKE = [name for name, each in ACCELERATORS.items() if each.generation.name != "v2"]


def valid(text: str) -> list[dict[str, Any]]:
    """Parses objects that a cluster must take."""
    objects = list(yaml.safe_load_all(text))
    assert [schemas.mistakes(each) for each in objects] == [[]] * len(objects)
    return objects


def rendered(*changes: str) -> list[dict[str, Any]]:
    return valid(render(load(EXAMPLE, changes), secret=golden.SECRET, image=IMAGE))


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return job_of(documents)["template"]["spec"]


def job_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return documents[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("name", ON_GKE)
def test_every_size_of_every_accelerator_is_valid_and_has_its_hosts_and_chips(name: str) -> None:
    slice_ = ACCELERATORS[name]
    size = [f"slice.accelerator_type={name}", f"train.global_batch_size={slice_.devices}"]
    objects = rendered(*size)
    job, pod = job_of(objects), pod_of(objects)
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (slice_.hosts, slice_.hosts, "Indexed")
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == {"google.com/tpu": str(slice_.chips_per_host)} == resources["requests"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == slice_.topology_name
    assert int(gke_nodes(slice_).machine_type.rsplit("-", 1)[1].removesuffix("t")) == slice_.chips_per_host
    work = standalone_workload(load(EXAMPLE, size), "demo", IMAGE, golden.SECRET)
    objects = valid("---\n".join(documents(replace(work, by_cluster=False))))
    assert objects[-1]["spec"]["failurePolicy"] == {"maxRestarts": 0}, "tpu-launch decides"
    assert job_of(objects)["backoffLimitPerIndex"] == 0
    assert "podFailurePolicy" not in job_of(objects)


@pytest.mark.parametrize("name", schemas.CUSTOM)
def test_the_kept_schemas_equal_the_published_ones(name: str) -> None:
    path = schemas.DEFINITIONS / f"{name}.yaml"
    for version in schemas._versions(path) if path.exists() else ():
        kept = schemas.custom()[version["group"], version["version"], version["kind"]]
        assert [kept] == [each["schema"] for each in schemas.reduce([version])]
        for case in golden.CASES if version["kind"] == "JobSet" else ():  # with its own copy of the Job's template
            (jobset,) = [each for each in yaml.safe_load_all(golden.render(case)) if each["kind"] == "JobSet"]
            assert schemas._custom(jobset, version["schema"]) == []


def test_the_schemas_find_mistakes() -> None:
    jobset = rendered()[-1]
    jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "GiveUp"
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 2
    jobset["spec"]["restarts"] = 1
    found = "\n".join(schemas.mistakes(jobset))
    assert [word in found for word in ("GiveUp", "paralelism", "'restarts' was unexpected")] == [True] * 3


@pytest.mark.parametrize("name", golden.CASES)
def test_manifests_equal_the_golden_files(name: str) -> None:
    kept = (golden.FOLDER / f"{name}.yaml").read_text()
    assert golden.render(name) == kept, "if intended: python -m tests.kubernetes.golden, and review the difference"
    assert valid(kept)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["slice.accelerator_type=v2-32"], ["never offered TPU v2", "v3, v4, v5e, v5p, v6e", "TPU VMs have v2"]),
        (["slice.accelerator_type=v3-16"], ["v3-16", "v3-8, v3-32"]),
        (["gke.topology=2x4"], ["v4-16 is 2x2x2, not 2x4", "v4-32 (2x2x4, 4 hosts)"]),
        (["gke.hosts=3"], ["v4-16 has 2 hosts of 4 chips, not 3", "v4-8 (2x2x1, 1 host)"]),
        (["slice.capacity=reserved"], ["gke.node_selector"]),
        (["slice.capacity=flex-start", "slice.queued={}", "slice.max_run_hours=1"], ["gke.node_selector"]),
        (["run.secrets=[HF_TOKEN]"], ["HF_TOKEN", "gke.secrets", "namespace default"]),
        (["gke.secrets={HF_TOKEN: hf_x}"], ["SECRET/KEY"]),
        (["gke.secrets={A: s/k}", "run.environment={A: b}"], ["A is in run.environment too"]),
        (["run.user=trainer"], ["UID"]),
        (["output=runs"], ["runs is lost with its pod", "gs://"]),
        (["run.name=" + "n" * 51], ["50 characters"]),
        (["gke.gcsfuse={bucket: my-bucket, folder: relative}"], ["gke.gcsfuse.folder"]),
        (["output=/runs", "gke.gcsfuse={bucket: my-bucket, folder: /bucket}"], ["/runs is lost with its pod"]),
        (["output=/bucket/a", "gke.gcsfuse={bucket: my-b, folder: /bucket, read_only: true}"], ["read_only is set"]),
    ],
)
def test_what_gke_can_not_run_is_refused(changes: list[str], words: list[str]) -> None:
    for refuse in (lambda: rendered(*changes), lambda: Gke(load(EXAMPLE, changes), print, this_machine())):
        with pytest.raises(BadInput) as refused:
            refuse()
        assert [word for word in words if word not in str(refused.value)] == []


def test_what_gke_can_run_is_rendered() -> None:
    assert rendered("gke.topology=2x2x2", "gke.hosts=2")
    assert rendered("output=/bucket/runs", "gke.gcsfuse={bucket: my-bucket, folder: /bucket/}")
    assert rendered("slice.capacity=reserved", "gke.node_selector={cloud.google.com/gke-nodepool: ours}")


def test_the_name_of_the_file_stays_in_its_comment(tmp_path: Path) -> None:
    path = tmp_path / "a\nkind: Pod\n.yaml"
    path.write_text(EXAMPLE.read_text())
    assert "`tpu-launch manifest` renders it from a kind: Pod .yaml.\napi" in render(load(path), secret="", image=IMAGE)


def test_an_image_must_be_named_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.gke.manifest.local.published", lambda config: config.image.reference)
    with pytest.raises(BadInput, match="give a digest"):
        render(load(EXAMPLE), secret=golden.SECRET, image="us-docker.pkg.dev/p/r/i:latest")
    with pytest.raises(BadInput, match="the digest of its image is not known"):
        render(load(EXAMPLE), secret=golden.SECRET)
    with pytest.raises(BadInput, match=r"image\.reference"):
        load(EXAMPLE, ["image.reference=us-docker.pkg.dev/p/r/i:latest"])
    assert f"image: {IMAGE}" in render(load(EXAMPLE, [f"image.reference={IMAGE}"]), secret=golden.SECRET)


@pytest.mark.parametrize(
    ("capacity", "asked", "given_"),
    [("on-demand", 60, 60), ("on-demand", 600, 600), ("spot", 10, 10), ("spot", 60, 25)],
)
def test_the_grace_period_fits_the_capacity(capacity: str, asked: int, given_: int) -> None:
    pod = pod_of(rendered(f"slice.capacity={capacity}", f"run.stop_seconds={asked}"))
    assert pod["terminationGracePeriodSeconds"] == given_
    assert ("cloud.google.com/gke-spot" in pod["nodeSelector"]) == (capacity == "spot")
    assert any(each["key"] == "cloud.google.com/gke-spot" for each in pod["tolerations"]) == (capacity == "spot")


@pytest.mark.parametrize("privileged", ["true", "false"])
def test_every_container_may_lock_its_memory_before_its_command_begins(privileged: str) -> None:
    container = pod_of(rendered(f"gke.privileged={privileged}"))["containers"][0]
    shell, option, script, *_ = container["command"]
    assert (shell, option) == ("sh", "-c")
    assert f"ulimit -l {64 * 2**40 // 1024} " in script, "KiB, which are 64 TiB"
    security = container["securityContext"]
    assert security.get("privileged") or "SYS_RESOURCE" in security["capabilities"]["add"]
    assert "$(" not in script, "Kubernetes would look for a variable"


def test_the_command_gets_the_limit_and_its_arguments(shell: str) -> None:
    """Sets a lower limit, which every process may do."""
    script = RAISE_LOCKED_MEMORY.replace(str(LOCKED_MEMORY_KIB), "16")
    program = "import os, resource, sys; print(os.getpid(), resource.getrlimit(resource.RLIMIT_MEMLOCK), sys.argv[1:])"
    words = ["it's", "", "$HOME", "a b"]
    command = [shell, "-c", script, "sh", sys.executable, "-c", program, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=20)
    assert output == f"{process.pid} {(16 * 1024, 16 * 1024)} {words}\n", "the command is the process itself"


def test_a_container_that_may_not_raise_the_limit_warns(shell: str) -> None:
    script = RAISE_LOCKED_MEMORY.replace(str(LOCKED_MEMORY_KIB), "refused")  # any failure; root may raise it here
    ended = subprocess.run([shell, "-c", script, "sh", "echo", "goes on"], capture_output=True, text=True, check=True)
    assert ended.stdout == "goes on\n"
    assert "tpu-launch: the locked-memory limit stays low" in ended.stderr


def test_the_trainer_finds_its_peers_from_the_manifest_alone() -> None:
    pod = pod_of(rendered("slice.accelerator_type=v4-32"))
    environment = {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}
    names = tuple(host_name("demo", str(index)) for index in range(4))
    assert from_environment({**environment, "JOB_COMPLETION_INDEX": "2"}) == Cluster(2, names, "v4-32", "demo")


def test_names_that_do_not_fit_a_host_name_are_refused() -> None:
    assert check_name("a" * 49)
    with pytest.raises(BadInput, match="too long"):
        check_name("a" * 50)
    with pytest.raises(BadInput, match="too long"):
        Gke(load(EXAMPLE, ["run.name=" + "a" * 30]), print, this_machine())
    assert len(host_name("a" * 49, "255").split(".")[0]) <= 63
    with pytest.raises(BadInput, match="lower-case"):
        check_name("Demo")
    with pytest.raises(BadInput, match="lower-case"):
        render(load(EXAMPLE), secret=golden.SECRET, image=IMAGE, name="Demo")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["notebook", "--provider", "gke"], "`kubectl port-forward POD 8888` are a cluster's way"),
        (["plan", "--provider", "gke"], "tpu-launch plan is for TPU VMs; with --provider gke there are up, run"),
        *(([verb, "--dry-run", "--provider", "gke"], "`tpu-launch manifest` ") for verb in ("up", "run", "down")),
        (["--emulated", "run", "--provider", "gke"], "a cluster is not emulated"),
    ],
)
def test_commands_without_a_cluster_say_so(words: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, [*words, "-f", str(EXAMPLE)])
    assert isinstance(result.exception, BadInput)
    assert message in str(result.exception)


def secret_entry(objects: list[dict[str, Any]]) -> dict[str, Any]:
    [entry] = [entry for entry in pod_of(objects)["containers"][0]["env"] if entry["name"] == "TPU_LAUNCH_SECRET"]
    return entry["valueFrom"]["secretKeyRef"]


def test_the_command_prints_a_manifest_alone_with_a_new_secret_for_several_hosts() -> None:
    values = []
    for _ in range(2):
        words = ["manifest", "-f", str(EXAMPLE), "--image", IMAGE, "--name", "other", "--", "true"]
        objects = valid(CliRunner().invoke(cli, words, catch_exceptions=False).stdout)
        assert [each["kind"] for each in objects] == ["ConfigMap", "Secret", "JobSet"]
        assert {each["metadata"]["name"] for each in objects} == {"other"}
        assert pod_of(objects)["containers"][0]["command"][-2:] == ["sh", "true"]
        assert secret_entry(objects) == {"name": "other", "key": "secret"}
        values.append(objects[1]["data"]["secret"])
        assert values[-1] not in yaml.safe_dump(objects[2])
    assert [len(base64.b64decode(value)) for value in set(values)] == [64, 64]


def test_one_host_has_no_secret_and_a_secret_of_the_user_is_kept() -> None:
    one, own = rendered("slice.accelerator_type=v5litepod-8"), rendered("gke.secrets={TPU_LAUNCH_SECRET: mine/key}")
    assert [each["kind"] for each in (*one, *own)] == ["ConfigMap", "JobSet"] * 2
    assert secret_entry(own) == {"name": "mine", "key": "key"}


K8S = kustomize.FOLDER


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Returns a copy of k8s/ with the file that its user creates."""
    folder = tmp_path / "k8s"
    shutil.copytree(K8S, folder)
    (folder / "base" / kustomize.SECRET_FILE).write_text("0123456789abcdef0123456789abcdef\n")
    return folder


def build(folder: Path) -> str:
    return subprocess.check_output([find("kubectl"), "kustomize", folder], text=True, timeout=60)


def test_every_file_is_what_the_code_renders() -> None:
    for path, text in kustomize.files().items():
        assert (K8S / path).read_text() == text, "if intended: python -m tools.kustomize, and review the difference"
    kept = [path for folder in ("base", "overlays") for path in (K8S / folder).rglob("*") if path.is_file()]
    assert {str(path.relative_to(K8S)) for path in kept} == set(kustomize.files())


@pytest.mark.parametrize("name", kustomize.OVERLAYS)
def test_kubectl_builds_from_an_overlay_what_tpu_launch_renders(written: Path, name: str) -> None:
    text = build(written / "overlays" / name)
    if name == "torch-xla":  # differs by the reader's own repository alone
        text = text.replace("MY-PROJECT/MY-REPOSITORY", "my-project/tpu-launch")
    found = {each["kind"]: each for each in valid(text)}
    assert len(found) == 3
    for wanted in kustomize.objects_of(name):
        for each in (found[wanted["kind"]], wanted):
            if "data" in each:  # kustomize takes the last line's end from a patch
                each["data"] = {key: text.rstrip("\n") for key, text in each["data"].items()}
        assert found[wanted["kind"]] == wanted
    secret = found["Secret"]
    assert secret["metadata"] == found["ConfigMap"]["metadata"], "one name, namespace and labels"
    assert base64.b64decode(secret["data"]["secret"]) == b"0123456789abcdef0123456789abcdef\n"


def test_the_base_is_valid_and_without_the_secret_kubectl_names_its_file(written: Path) -> None:
    assert len(valid(build(written / "base"))) == 3
    command = [find("kubectl"), "kustomize", K8S / "base"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode != 0
    assert f"base/{kustomize.SECRET_FILE}" in refused.stderr


def test_the_queue_and_the_role_are_valid() -> None:
    for path in ("overlays/kueue/queue.yaml", "role.yaml"):
        assert valid((K8S / path).read_text())


def test_the_guide_names_every_machine_type() -> None:
    guide = (K8S.parent / "docs" / "guide" / "gke.md").read_text()
    for name in ON_GKE:
        assert f"`{gke_nodes(ACCELERATORS[name]).machine_type}`" in guide


ODD = [
    "16Gi", "1:30:45.5", "--", "...", "? b", "trailing ", "a\n\nb\n", "a\n\n", " a\n", "a\r\nb", "\x07\n",
    "a\n\u2028b\n", "2001-12-14t21:59:43.10-05:00",
]  # fmt: skip
PLAIN = ["demo", "tpu-launch/run", "/etc/tpu-launch", "$(NAME)", "v3-32", "e1", "cloud.google.com/gke-tpu-topology"]

text = st.text() | st.sampled_from([*TRICKY, *ODD, *PLAIN])
values = st.recursive(
    text | st.integers() | st.booleans() | st.just({}) | st.just([]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


def ruamel(version: tuple[int, int], document: str) -> Any:
    reader = YAML(typ="safe", pure=True)
    reader.version = version
    return reader.load(document)


READERS = {"PyYAML, 1.1": yaml.safe_load, **{f"ruamel, {each}": partial(ruamel, each) for each in ((1, 1), (1, 2))}}


@settings(max_examples=300)
@given(values)
@example([*TRICKY, *ODD, *PLAIN])
def test_python_readers_get_the_written_values(value: Any) -> None:
    document = fill("a:\n  - b: $value\n    # once more, below another key\n    c: $value\n", {"value": value})
    for name, read in READERS.items():
        assert same(read(document), {"a": [{"b": value, "c": value}]}), name
        if isinstance(value, dict | list):
            assert same(read(dump(value)), value), name


def test_kubectl_gets_the_written_values(tmp_path: Path) -> None:
    """Reads with Go. Leaves out a line separator that Go writes in a form that Python's readers fold."""
    values = [value for value in [*TRICKY, *PLAIN, *ODD] if value != "\x85"]
    strings = {f"key-{number}": value for number, value in enumerate(values)}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo"}, "data": strings}
    (tmp_path / "object.yaml").write_text(dump(document))
    (tmp_path / "kustomization.yaml").write_text("resources: [object.yaml]\n")
    # Read all scalars as text: a value that Go took for a number or a boolean is written differently.
    assert yaml.load(build(tmp_path), yaml.BaseLoader)["data"] == strings


def test_a_template_leaves_out_what_its_conditions_say() -> None:
    template = (
        "# of all\na:  # if yes\n  # of $name\n  b: $name\n  $more\n"
        "# of c\nc:  # if not yes\n  # of d\n  d: 1\n  e: 2\n"
        "f:\n  # of an item\n  - g  # if not no\n  - h$name-i\n  $no\n"
    )
    values = {"yes": 1, "no": [], "name": "x", "more": {"text": "a\n\n  b\n", "z": [True]}}
    assert fill(template, values) == (
        "# of all\na:\n  # of x\n  b: x\n  text: |\n    a\n\n      b\n  z:\n    - true\n"
        "f:\n  # of an item\n  - g\n  - hx-i\n"
    )
    with pytest.raises(KeyError):
        fill("a: $missing", values)
