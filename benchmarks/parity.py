"""Checks that both backends train alike: PyTorch/XLA and TensorFlow, from the same seed, on the same dataset
folder, each in its own image.

    make benchmark NAME=parity            masked-language modelling and classification, on 1 and on 2 hosts, and
    RoBERTa: 20 steps in fp32 without dropout

It compares the batches (with their masks) that every host of each backend gets, integer by integer, and the loss of
every step. Then each backend continues from the other's checkpoint of step 10, weights and moments, and is compared
with the uninterrupted run; and the model that TensorFlow exported is loaded in plain torch and gets the same inputs as
PyTorch's. The text is this repository's licence, and README with the guide.

This file runs in three places: the workstation starts a container of each image (`compare`), whose first process starts
one for each host (`in_container`), which trains (`as_host`). Hosts meet on loopback.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import Row, finish, row

HOUSE = Path(__file__).resolve().parent.parent

STEPS = 20
LENGTH = 64
HOSTS = {"mlm": (1, 2), "classification": (1, 2), "roberta": (1,)}
MODELS = {"roberta": {"name": "roberta-base", "hidden_size": 128, "layers": 1, "heads": 2, "max_positions": LENGTH}}
MODEL = {"name": "bert-tiny", "max_positions": LENGTH}
BACKENDS = ("torch-xla", "tensorflow")
PORTS = range(18500, 18600, 2)  # of the container's own loopback
CONTAINER_SECONDS = 900
MASKED, LABELLED = "you may add your own [MASK] notices", "a container on every host of the slice"

Job = dict[str, Any]


# --- on the workstation


def compare(folder: Path) -> list[dict[str, Any]]:
    """Returns all rows of the report; `folder` keeps the runs."""
    guide = [HOUSE / "README.md", *sorted((HOUSE / "docs" / "guide").glob("*.md"))]
    for name, sources in (("licence", [HOUSE / "LICENSE"]), ("readme", guide)):
        (folder / f"{name}.txt").write_text("\n".join(source.read_text() for source in sources))
    examples = [
        (line.strip(), name)
        for name in ("licence", "readme")
        for line in (folder / f"{name}.txt").read_text().splitlines()
    ]
    with (folder / "examples.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in examples if len(text) > 30)
    for backend in BACKENDS:
        fresh = [(case, hosts) for case in HOSTS for hosts in HOSTS[case]]
        in_image(
            backend,
            folder,
            [
                {"case": case, "hosts": hosts, "backend": backend, "run": run_of(backend, case, hosts)}
                for case, hosts in fresh
            ],
        )
    resumed = {}
    for backend, other in zip(BACKENDS, reversed(BACKENDS), strict=True):
        jobs = []
        for case in HOSTS:
            name = f"{case}-resumed-{backend}"
            shutil.copytree(folder / "runs" / run_of(other, case, 1), folder / "runs" / name)
            shutil.rmtree(folder / "runs" / name / "checkpoints" / f"step-{STEPS:08d}")
            jobs.append({"case": case, "hosts": 1, "backend": backend, "run": name, "attempt": 1})
            resumed[other, case] = name
        in_image(backend, folder, jobs, ask=[run_of(each, case, 1) for each in BACKENDS for case in HOSTS])
    return report(folder, resumed)


def run_of(backend: str, case: str, hosts: int) -> str:
    return f"{case}-{hosts}-{backend}"


def in_image(backend: str, folder: Path, jobs: list[Job], ask: list[str] | None = None) -> None:
    """Runs jobs one after another in a container of a backend's image. PyTorch's then also runs the models of these
    runs."""
    from launcher.images import engine
    from launcher.images.build import ensure_image
    from launcher.images.specification import default_spec

    reference = ensure_image(default_spec(backend), lambda line: print(line, file=sys.stderr, flush=True)).reference
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"jobs": jobs, "ask": ask if backend == "torch-xla" else None}))
    container = [
        engine.client(),
        "run",
        "--rm",
        "--init",
        "--network=none",
        "--shm-size=1g",
        "--label=tpu-launch.tests=benchmark",
    ]
    container += [
        f"--user={os.getuid()}:{os.getgid()}",
        f"--volume={HOUSE / 'benchmarks'}:/src/benchmarks:ro",
        f"--volume={folder}:/parity",
    ]
    for variable in (
        "HOME=/tmp",
        "PYTHONDONTWRITEBYTECODE=1",
        "PJRT_DEVICE=CPU",
        "XLA_FLAGS=--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    ):
        container.append(f"--env={variable}")
    command = [*container, reference, "python", "/src/benchmarks/parity.py", "--plan", "/parity/plan.json"]
    with (folder / f"{backend}.log").open("a+") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=CONTAINER_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            log.seek(0)
            tail = "".join(log.readlines()[-30:])
            raise SystemExit(f"the runs of {backend} ended with {code} (-1: after {CONTAINER_SECONDS} s):\n{tail}")


def report(folder: Path, resumed: dict[tuple[str, str], str]) -> list[Row]:
    rows = []

    def found(name: str, unit: str, ours: float, limit: float, goal: str) -> None:
        rows.append(row(name, unit, ours, "limit", limit, goal))

    for case in HOSTS:
        for hosts in HOSTS[case]:
            torch, tensorflow = (run_of(backend, case, hosts) for backend in BACKENDS)
            where = f"{case}, {hosts} host(s)"
            digests = [
                [json.loads((folder / f"{run}.{worker}.batches.json").read_text()) for worker in range(hosts)]
                for run in (torch, tensorflow)
            ]
            different = sum(
                a != b for one, other in zip(*digests, strict=True) for a, b in zip(one, other, strict=True)
            )
            found(f"{where}: host batches that differ", f"of {STEPS * hosts}", different, 0, "none")
            found(
                f"{where}: losses",
                "relative",
                worst(losses(folder, torch), losses(folder, tensorflow)),
                1e-5,
                "at most 1e-5",
            )
        for backend, other in zip(BACKENDS, reversed(BACKENDS), strict=True):
            far = worst(
                losses(folder, run_of(backend, case, 1))[STEPS // 2 :],
                losses(folder, resumed[backend, case])[STEPS // 2 :],
            )
            found(f"{case}: {other} goes on from {backend}'s step {STEPS // 2}", "relative", far, 1e-4, "at most 1e-4")
        answers = [
            json.loads((folder / f"{run_of(backend, case, 1)}.answers.json").read_text()) for backend in BACKENDS
        ]
        found(
            f"{case}: answers of TensorFlow's model in plain torch", "relative", worst(*answers), 1e-4, "at most 1e-4"
        )
    return rows


def losses(folder: Path, run: str) -> list[float]:
    from training.telemetry.metrics import read_history

    found = [line["loss"] for line in read_history(str(folder / "runs" / run)) if "loss" in line]
    if len(found) != STEPS:
        raise SystemExit(f"run {run} has {len(found)} losses instead of {STEPS}")
    return found


def worst(one: list[float], other: list[float]) -> float:
    """Returns the largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


# --- in a container


def in_container(plan: Path) -> None:
    """Makes the data once; then starts one process for all runs of one host, and two for the runs of two hosts."""
    folder = plan.parent
    if not (folder / "data").exists():
        prepare(folder)
    jobs = json.loads(plan.read_text())["jobs"]
    parts = [(hosts, worker) for hosts in sorted({job["hosts"] for job in jobs}) for worker in range(hosts)]
    hosts = [
        subprocess.Popen([sys.executable, __file__, "--plan", str(plan), "--host", f"{size}.{worker}"])
        for size, worker in parts
    ]
    codes = [host.wait() for host in hosts]
    if any(codes):
        raise SystemExit(f"the hosts ended with {codes}")
    asked = json.loads(plan.read_text())["ask"]
    if asked:
        ask(folder, asked)


def prepare(folder: Path) -> None:
    tokenizer = [
        "tokenizer",
        "--corpus",
        f"{folder}/licence.txt",
        "--corpus",
        f"{folder}/readme.txt",
        "--vocabulary",
        "500",
    ]
    shards = ["shards", "--tokenizer", f"{folder}/tokenizer", "--sequence-length", str(LENGTH)]
    labelled = ["--task", "classification", "--corpus", f"{folder}/examples.jsonl", "--lengths", f"32,{LENGTH}"]
    for command in (
        [*tokenizer, "--out", f"{folder}/tokenizer"],
        [
            *shards,
            "--corpus",
            f"{folder}/licence.txt",
            "--evaluation-percent",
            "0",
            "--split",
            "train",
            "--out",
            f"{folder}/data/mlm",
        ],
        [*shards, *labelled, "--evaluation-percent", "0", "--split", "train", "--out", f"{folder}/data/classification"],
    ):
        subprocess.run(["tpu-train", *command], check=True, timeout=300)


def as_host(plan: Path, hosts: int, worker: int) -> None:
    """Trains this host's part of all runs of this many hosts."""
    from training.config import from_document
    from training.distributed.cluster import Cluster
    from training.distributed.config import RendezvousSection
    from training.distributed.rendezvous import SingleHost, join
    from training.distributed.shutdown import ShutdownRequest
    from training.telemetry.host_progress import PhaseTimer
    from training.trainer import train
    from training.yaml_file import Document

    folder = plan.parent
    for number, job in enumerate(json.loads(plan.read_text())["jobs"]):
        if job["hosts"] != hosts:
            continue
        config = from_document(Document(job["run"], document(folder, job), {}))
        cluster = Cluster(
            worker, ("127.0.0.1",) * hosts, None, job["run"], job.get("attempt", 0), PORTS[number], PORTS[number] + 1
        )  # fmt: skip
        stopping = ShutdownRequest()
        limits = RendezvousSection(start_seconds=300, seconds=300, lost_seconds=30)
        rendezvous = SingleHost() if hosts == 1 else join(cluster, stopping, limits)
        digests = batches(config, cluster)
        (folder / f"{job['run']}.{worker}.batches.json").write_text(json.dumps(digests))
        train(config, cluster, rendezvous, stopping, PhaseTimer())
        rendezvous.close(0)


def document(folder: Path, job: Job) -> dict[str, Any]:
    task = "classification" if job["case"] == "classification" else "mlm"
    return {
        "seed": 7,
        "task": task,
        "backend": job["backend"],
        "model": MODELS.get(job["case"], MODEL),
        "data": {"train": f"{folder}/data/{task}/train", "tokenizer": f"{folder}/tokenizer"},
        "train": {
            "steps": STEPS,
            "global_batch_size": 8,
            "learning_rate": 0.0005,
            "warmup_steps": 5,
            "dropout": 0.0,
            "log_every": 1,
        },
        "checkpoint": {"every_steps": STEPS // 2, "keep_last": 2},
        "output": f"{folder}/runs",
    }


def batches(config: Any, cluster: Any) -> list[str]:
    """Returns a hash of each of this host's batches: names, dtypes, shapes and every number."""
    from training.run_setup import open_task

    task = open_task(config, cluster)
    found = []
    source = task.batches(0)
    for _ in range(STEPS):
        digest = hashlib.sha256()
        for name, array in sorted(next(source).arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
        found.append(digest.hexdigest())
    source.close()
    return found


def ask(folder: Path, runs: list[str]) -> None:
    """Loads exported models in plain torch, and records the scores of their answers."""
    from training.models.predict import classify, fill_mask

    for run in runs:
        model = f"{folder}/runs/{run}/model"
        labelled = run.startswith("classification")
        found = classify(model, LABELLED, 2) if labelled else fill_mask(model, MASKED, 20)
        (folder / f"{run}.answers.json").write_text(json.dumps([answer.score for answer in found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.host:
        hosts, worker = map(int, options.host.split("."))
        as_host(options.plan, hosts, worker)
        sys.stdout.flush()
        os._exit(0)  # frameworks' threads may not survive an orderly end
    if options.plan:
        in_container(options.plan)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder))
    finish("parity", rows, options.json)


if __name__ == "__main__":
    main()
