"""`tpu-train`: commands imported when called, mistakes in one message, and programs of several processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
import yaml
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from tests.processes import run_module, run_python
from training.cli.main import tpu_train
from training.cli.preflight import check_user_module
from training.cli.processes import chip_process_environment, gloo_environment
from training.distributed.cluster import Cluster
from training.errors import BadInput, Exit
from training.lazy_command import LazyCommand


@pytest.fixture
def group() -> click.Group:
    commands = {"absent": "Is never imported here.", "report": "Prints."}
    return click.Group(commands=[LazyCommand(name, "no.such.module:command", text) for name, text in commands.items()])


def test_help_and_completion_list_all_commands_without_importing_any(group: click.Group) -> None:
    shown = CliRunner().invoke(group, ["--help"]).output.partition("Commands:\n")[2]
    assert [line.strip() for line in shown.splitlines()] == ["absent  Is never imported here.", "report  Prints."]
    found = ShellComplete(group, {}, "group", "_COMPLETE").get_completions([], "")
    assert [(each.value, each.help) for each in found] == [("absent", "Is never imported here."), ("report", "Prints.")]


def test_a_mistyped_name_of_a_lazy_command_gets_a_suggestion(group: click.Group) -> None:
    result = CliRunner().invoke(group, ["abssent"])
    assert (result.exit_code, "absent" in result.output) == (2, True)


def test_every_command_of_tpu_train_can_be_imported() -> None:
    for command in tpu_train.commands.values():
        assert isinstance(command, LazyCommand)
        assert command.load().name == command.name


def test_help_of_tpu_train_imports_neither_data_nor_configuration() -> None:
    heavy = ("numpy", "google.cloud.storage", "pydantic", "training.config", "training.data")
    script = (
        "import sys; from training.cli.main import main\n"
        f"try: main()\nfinally: assert not [name for name in {heavy} if name in sys.modules]"
    )
    run_python("-c", script, "--help")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("training.checkpoint.admin", ("pydantic", "training.config", "training.distributed")),
        ("training.data.formats.dataset", ("numpy", "torch", "google.cloud.storage")),  # on the workstation
    ],
)
def test_a_small_part_does_not_import_large_ones(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    assert run_python("-c", code) == "[]\n"


@pytest.mark.parametrize("end", ["raise EndAtOnce(3)", "raise DoesNotFit"])
def test_a_crash_in_an_orderly_end_does_not_change_the_exit_code(end: str) -> None:
    script = f"""import atexit, os, click; from training.cli.main import EndAtOnce, main, tpu_train
from training.preflight.compiler import DataDependentProgram as DoesNotFit
def ends(): print("report", end=""); {end}
tpu_train.add_command(click.Command("ends", callback=ends)); atexit.register(os.abort); main()"""
    ended = subprocess.run([sys.executable, "-c", script, "ends"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "report"), ended.stderr


CONFIG = {
    "model": {"name": "bert-tiny"}, "data": {"train": "data/train", "tokenizer": "tokenizer"},
    "train": {"steps": 4, "global_batch_size": 4}, "output": "runs",
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (["train", "nowhere.yaml"], {}, "nowhere.yaml: no such file"),
        (["train", "run.yaml"], {}, "tokenizer is not a tokenizer folder"),
        (["train", "run.yaml"], {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b"}, "worker 3, but only 2 host(s)"),
        (["checkpoint", "list", "."], {}, "no committed checkpoint below"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, arguments: list[str], environment: dict[str, str], told: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    ended = run_module("training.cli", tmp_path, *arguments, PJRT_DEVICE="CPU", **environment)
    text = ended.stdout + ended.stderr
    assert (ended.returncode, text.count("tpu-train:")) == (Exit.BAD_INPUT, 1), text
    assert "Traceback" not in text
    assert told in text


PARENT = """
import sys
from training.cli.processes import run_ranks
environments = [{"RANK": str(rank)} for rank in range(3)]
sys.exit(run_ranks([sys.executable, "-c", sys.argv[1]], environments))
"""
STUBBORN = "import os, signal, sys, time\nrank = os.environ['RANK']\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def begin(program: str) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-c", PARENT, program], {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_every_line_has_its_rank_and_all_end_well() -> None:
    process = begin("import os, sys\nprint('hello', os.environ['RANK'])\nprint('warned', file=sys.stderr)")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == [f"rank {rank}: hello {rank}" for rank in range(3)]
    assert sorted(errors.splitlines()) == [f"rank {rank}: warned" for rank in range(3)]


def test_first_failure_ends_the_others_within_10_s_and_is_named() -> None:
    program = "print('pid', os.getpid())\nif rank == '1':\n    print('why')\n    sys.exit(7)\ntime.sleep(600)"
    began = time.monotonic()
    process = begin(STUBBORN + program)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "tpu-train: error: rank 1 ended with exit code 7; the other 2 processes of this host were stopped" in errors
    assert errors.rstrip().endswith("\n  why"), errors
    assert time.monotonic() - began < 10 + 5, "with the start of Python"
    for identifier in map(int, re.findall(r"pid (\d+)", out)):
        assert not Path(f"/proc/{identifier}").exists()


def test_a_killed_process_is_the_cause_and_a_lost_peer_is_not(tmp_path: Path) -> None:
    """The others end as soon as it is dead, as processes do that wait for each other."""
    program = (
        f"{STUBBORN}import fcntl\nheld = open({str(tmp_path / 'held')!r}, 'a')\n"
        "if rank == '2':\n    fcntl.flock(held, fcntl.LOCK_EX)\n    held.write('held')\n    held.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not os.fstat(held.fileno()).st_size:\n    time.sleep(0.01)\n"
        "fcntl.flock(held, fcntl.LOCK_SH)\nsys.exit(76)"
    )
    process = begin(program)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 137, errors
    assert "rank 2 was killed by SIGKILL (exit code 137)" in errors


def test_signals_are_forwarded_and_every_process_ends_in_its_own_time() -> None:
    program = (
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.2 * int(os.environ['RANK']))\n    print('saved')\n    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready')\ntime.sleep(600)"
    )
    process = begin(program)
    assert all("ready" in process.stdout.readline() for _ in range(3))
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "tpu-train: stopped: rank" in errors
    assert sorted(out.splitlines()) == [f"rank {rank}: saved" for rank in range(3)]


def test_a_checked_file_that_ends_the_process_is_not_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "training.backends.torch_xla.lint", Mock())
    monkeypatch.setattr("training.run_setup.prepare_framework", Mock())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    (file := tmp_path / "own.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(BadInput, match=r"own.py:2: SystemExit: 0"):
        check_user_module(f"{file}:build", f"{file}:batches", 2, 1)


def test_several_cpu_hosts_get_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert gloo_environment(Cluster(1, ("10.0.0.2", "10.0.0.3"))) == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "8491", "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


def test_a_tpu_host_leaves_the_bounds_of_processes_to_torch_xla() -> None:
    assert chip_process_environment(Cluster(1, ("10.0.0.2", "10.0.0.3"), "v4-16")) == {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-16", "TPU_HOST_BOUNDS": "1,1,2",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3",
        "TPU_TOPOLOGY_WRAP": "false,false,false", "TPU_TOPOLOGY_ALT": "false",
    }  # fmt: skip


def test_two_devices_a_chip_are_refused() -> None:
    with pytest.raises(BadInput, match="v3-8 has two devices"):
        chip_process_environment(Cluster(0, ("10.0.0.2",), "v3-8"))
