"""Preflight: the trainer's own step, compiled by the real TPU compiler for slices that are not there."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from tests.container import causal_data, small_runs, test_label_list_runs
from tests.nightly import others_at_night
from tests.processes import run_python
from training.accelerators import accelerator
from training.backends.torch_xla import tracing
from training.config import Model
from training.distributed.cluster import Cluster, torch_xla_environment
from training.errors import BadInput
from training.models.hugging_face import ModelRequirements
from training.models.torch.network import build
from training.preflight import compiler
from training.preflight.compiler import CompilerUnavailable, DataDependentProgram, Program
from training.preflight.programs import Graph, TracedProgram
from training.preflight.report import GIB
from training.preflight.search import compile_all

SECONDS = 800  # a compilation takes seconds on a quiet machine, and minutes on one that tests share
pytestmark = pytest.mark.timeout(SECONDS + 60)

DOUBLED = """module @doubled { func.func public @main(%a: tensor<256x256xf32>) -> tensor<256x256xf32> {
  %0 = stablehlo.add %a, %a : tensor<256x256xf32>
  return %0 : tensor<256x256xf32> } }"""


def preflight(document: dict[str, Any], path: Path, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Runs `tpu-train preflight`, which must end with a code. Returns its results, and what it says."""
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "training.cli", "preflight", str(path), "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr
    accelerators = json.loads(ended.stdout)["accelerators"] if ended.stdout else []
    return {result["accelerator"]: result for result in accelerators}, ended.stderr


@pytest.fixture(scope="module")
def v4(folder: Path) -> dict[str, Any]:
    """The small run of these tests on a v4-8: four devices of two cores each."""
    document = small_runs.document(folder, train__precision="bf16")
    return preflight(document, folder / "v4.yaml", "--accelerator", "v4-8")[0]["v4-8"]


def test_the_gradients_are_added_over_the_devices(v4: dict[str, Any]) -> None:
    """Every parameter's gradient is in an all-reduce; a tied weight's two parts may travel apart."""
    training, evaluation = v4["graphs"]
    parameters = small_runs_size()
    exchanged = sum(item["elements"] for item in training["collectives"] if item["kind"] == "all-reduce")
    assert parameters <= exchanged < 2 * parameters
    types = {dtype for item in training["collectives"] for dtype in item["dtypes"]}
    assert types == {"bf16", "f32"}, "those of products travel as bf16"
    assert sum(item["bytes"] for item in evaluation["collectives"] if item["kind"] == "all-reduce") < 1000


def small_runs_size(width: int = 32) -> int:
    return sum(math.prod(shape) for shape in small_runs_shapes(width))


def small_runs_shapes(width: int) -> list[tuple[int, ...]]:
    model = Model(name="bert-tiny", hidden_size=width, layers=2, heads=2, max_positions=32)
    network = build(model, ModelRequirements(vocabulary=200, pad=3, sequence_length=32), dropout=0.1, seed=1)
    return [tuple(value.shape) for value in network.parameters()]


def test_the_state_is_counted_once(v4: dict[str, Any]) -> None:
    """New weights and moments live where the old ones were: they are donated."""
    training, evaluation = v4["graphs"]
    memory = training["memory"]
    assert memory["donated"] >= 3 * 4 * small_runs_size()
    assert evaluation["memory"]["resident"] >= 2 * 4 * small_runs_size(), "the moments wait beside an evaluation"


def traced_step(folder: Path, name: str, target: str, **changes: Any) -> dict[str, Any]:
    """Of the small run at width 128: on a TPU the tensors of a narrower one are mostly padding."""
    model = {"name": "bert-tiny", "hidden_size": 128, "layers": 2, "heads": 2, "max_positions": 32}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(small_runs.document(folder, model=model, train__global_batch_size=32, **changes)))
    return json.loads(run_python("-m", "tests.container.traced_step", str(path), target, seconds=SECONDS))


@pytest.mark.parametrize(
    "evaluation", [pytest.param("with evaluation", marks=pytest.mark.nightly), "without, and with the choice to skip"]
)
def test_all_of_the_state_is_donated(folder: Path, evaluation: str) -> None:
    skip = {"data__evaluation": None, "train__on_nonfinite": "skip"}  # the old state is needed to the program's end
    changes: dict[str, Any] = {} if evaluation == "with evaluation" else skip
    step = traced_step(folder, "donors", "v3-8", train__precision="bf16", **changes)
    assert step["donated_bytes"] == 3 * 4 * small_runs_size(width=128)
    assert step["resident_bytes"] == 0, "nothing of the state waits beside a step"
    assert step["overwritten"] == sorted(step["overwritten"]) != [], "outputs have the order of what they replace"
    assert step["sums_over_two_axes"] == 2 * 4, "of gradients of query, key, value and output in two layers"


def test_every_device_of_several_hosts_gets_the_whole_state(folder: Path) -> None:
    """The program says so of every output; a v3-32 device makes the shapes of the whole, also without the update."""
    step = traced_step(folder, "replicated", "v3-32", train__precision="bf16", train__on_nonfinite="skip")
    shapes = small_runs_shapes(width=128)
    stacks = {shape for shape in shapes if len(shape) == 1}  # vectors of one length are one output
    assert len(step["output_shapes"]) == 3 * (len([shape for shape in shapes if len(shape) > 1]) + len(stacks)) + 1
    assert step["free_outputs"] == 0
    assert step["local_output_shapes"] == step["output_shapes"]


@pytest.mark.nightly
def test_products_of_fp32_are_not_rounded_to_bf16(folder: Path) -> None:
    """Otherwise a TPU rounds their factors. Without a precision in the file, a TPU has bf16."""
    step = traced_step(folder, "exact", "v3-8", train__precision="fp32")
    assert step["exact_products"] == step["products"] > 0
    assert step["types_of_products"] == ["f32"]
    assert traced_step(folder, "default", "v3-8")["types_of_products"] == ["bf16"]


def test_two_preflights_at_once_share_the_compiler(folder: Path) -> None:
    """libtpu has a lock file in /tmp for chips, and there are none here."""
    program = (
        "import sys\n"
        "from tests.container.test_preflight import DOUBLED\n"
        "from training.accelerators import accelerator\n"
        "from training.preflight.compiler import Program, compile_program\n"
        "compile_program(Program(DOUBLED), accelerator('v3-8'))\n"
        "print('compiled', flush=True)\n"
        "sys.stdin.read()\n"  # libtpu stays loaded
    )
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines = [process.stdout.readline() for process in both if process.stdout]
    for process in both:
        process.communicate(timeout=60)
    assert lines == ["compiled\n", "compiled\n"]


@pytest.mark.nightly
def test_programs_are_compiled_with_the_flags_of_the_run(folder: Path) -> None:
    """torch_xla's own, those of the generation, and the file's. The compiler has read all: it refuses unknown flags."""
    own = {"LIBTPU_INIT_ARGS": "--xla_latency_hiding_scheduler_rerun=2"}
    document = small_runs.document(folder, run={"environment": own})
    for name, result in preflight(document, folder / "flags.yaml", "--accelerator", "v5litepod-8,v3-8")[0].items():
        addresses = ("localhost",) * accelerator(name).hosts
        assert result["flags"] == torch_xla_environment(Cluster(0, addresses, name), own)["LIBTPU_INIT_ARGS"]
        assert ("xla_enable_async_all_gather=true" in result["flags"]) == (name == "v5litepod-8")
    with pytest.raises(compiler.CompilationRefused, match="No such compile option"):
        compiler.compile_program(Program(DOUBLED), accelerator("v3-8"), {"no_such_flag": "1"})


def test_a_run_reports_programs_that_preflight_did_not_compile(folder: Path, v4: dict[str, Any]) -> None:
    """With four devices, the programs of a run are the v4-8's. One hash is kept back: of a program not checked."""
    training, evaluation = (graph["hash"] for graph in v4["graphs"])
    config = small_runs.document(folder, train__precision="bf16", train__steps=2)
    (host,) = small_runs.start(folder, "checked", config, CPU_NUM_DEVICES="4", TPU_LAUNCH_PREFLIGHT=training)
    assert host.finish(seconds=SECONDS) == 0, host.text()
    told = small_runs.summary(folder, "checked")["preflight"]
    assert told == f"1 of 2 programs are not what was checked: {evaluation}"
    assert (
        f"the evaluation program for arrays [8, 32], [8, 5], [8, 5], [8, 5] is {evaluation}, which is none that "
        "preflight compiled" in host.text()
    )
    assert "the training program" not in host.text()


WITH_AND_WITHOUT_WEIGHTS = """
import sys
from training.accelerators import accelerator
from training.backends.torch import state
from training.config import load
from training.preflight.programs import list_graphs, read_facts, trace_programs

config = load(sys.argv[1])
facts = read_facts(config)
for build_empty in (state.build_empty, lambda *arguments, **keywords: None):
    state.build_empty = build_empty
    traced = trace_programs(config, facts, list_graphs(config, facts), accelerator("v5litepod-4"))
    print([(each.program.hash, sorted(each.program.arguments.items()), each.resident_bytes) for each in traced])
"""


@pytest.mark.parametrize("fsdp", others_at_night((1, 4), (4,)))
def test_programs_traced_without_weights_are_those_of_a_run(folder: Path, fsdp: int) -> None:
    path = folder / f"empty-{fsdp}.yaml"
    changes = {"train__mesh": {"fsdp": fsdp}, "train__precision": "bf16"}
    path.write_text(yaml.safe_dump(small_runs.document(folder, **changes)))
    without, with_weights = run_python("-c", WITH_AND_WITHOUT_WEIGHTS, str(path), seconds=SECONDS).splitlines()[-2:]
    assert without == with_weights
    assert without.count("model/") > 20


@pytest.mark.parametrize("task", others_at_night(("multi-label", "token-classification"), ("token-classification",)))
def test_a_task_whose_labels_are_lists_is_compiled(tmp_path: Path, task: str) -> None:
    document = small_runs.labelled_document(test_label_list_runs.prepare(tmp_path, task), task)
    graphs = preflight(document, tmp_path / "lists.yaml", "--accelerator", "v4-8")[0]["v4-8"]["graphs"]
    assert len(graphs) == 3, "a step of each length, and one evaluation"
    assert all(graph["fits"] for graph in graphs)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_decoder_on_a_mesh_is_compiled(tmp_path: Path, adapters: bool) -> None:
    """Layers gather their matrices and scatter their gradients. At this width the compiler, left alone, splits hidden
    states as the matrices are, and moves 1.1 times the gradients' bytes by all-to-all in place of half of them."""
    folder = causal_data.prepare(tmp_path)
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1536}
    changes: dict[str, Any] = {"model": {"config": {**causal_data.LLAMA, **sizes}}, "train__precision": "bf16"}
    if adapters:
        config = transformers.AutoConfig.for_model(**causal_data.LLAMA, vocab_size=200)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "start")
        changes = {"model": {"path": str(folder / "start")}, "lora": {"rank": 2}}
    document = causal_data.document(folder, train__mesh={"fsdp": 4}, **changes)
    graphs = preflight(document, tmp_path / "decoder.yaml", "--accelerator", "v4-8")[0]["v4-8"]["graphs"]
    assert all(graph["fits"] for graph in graphs)
    if not adapters:
        sent = {item["kind"]: item["bytes"] for item in graphs[0]["collectives"]}
        assert sent["all-to-all"] < 0.75 * sent["reduce-scatter"]


def test_a_program_that_does_not_fit_is_reported_with_its_size() -> None:
    """The compiler refuses too large arguments. Outputs it lets pass, and what waits beside it: these we add up."""
    refused, too_much, crowded, small = (
        TracedProgram(Graph("training", 8, 32), Program(DOUBLED.replace("256x256", shape), hash=shape), beside, 0.0)
        for shape, beside in (("131072x131072", 0), ("32768x32768", 0), ("256x256", 8 * GIB), ("256x256", 0))
    )
    result = compile_all([refused, too_much, crowded, small], accelerator("v2-8"), print)
    assert [graph.fits for graph in result.graphs] == [False, False, False, True]
    assert result.graphs[0].reason == "does not fit: it needs 64.00 GiB of HBM a device, and 7.48 GiB are there"
    assert str(result.graphs[1].reason).startswith("does not fit: it needs 8.0")
    assert "8.00 GiB of them for state and programs beside it" in str(result.graphs[2].reason)
    assert not result.fits


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        (["--accelerator", "v3-16"], {}, "accelerator type 'v3-16' does not exist; v3 has v3-8"),
        ([], {}, "no accelerator: give --accelerator"),
        (["--accelerator", "v4-32"], {},
         "v4-32: train.global_batch_size is 8, which does not divide evenly over 16 devices on 4 hosts"),
        (["--accelerator", "v4-8"], {"data__train": "nowhere"},
         "Before there is data, say what it will be: --vocabulary and --sequence-length"),
        (["--accelerator", "v4-8", "--vocabulary", "100"], {}, "stand in for missing data: give both or neither"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(folder: Path, options: list[str], changes: dict[str, Any], expected: str) -> None:
    (folder / "bad.yaml").write_text(yaml.safe_dump(small_runs.document(folder, **changes)))
    with pytest.raises(BadInput, match=expected):
        small_runs.command("preflight", folder / "bad.yaml", *options)


def test_other_versions_are_refused() -> None:
    compiler.require_versions()
    message = r"libtpu is 0\.0\.\d+; only 9\.9\.9 was tested; nothing-such is not installed"
    with pytest.raises(CompilerUnavailable, match=message):
        compiler.require_versions(tested=[{"libtpu": "9.9.9", "nothing-such": "1"}])


def test_a_shape_that_depends_on_data_is_named_with_its_line() -> None:
    import torch
    import torch_xla

    class Picky(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values[values > 0].sum()

    class Steady(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values[torch.tensor([3, 1], device=values.device)]

    values = torch.ones(8).to(torch_xla.device())
    place = r"test_preflight\.py:\d+: return values\[values > 0\]\.sum\(\)"
    message = rf"aten\.index\.Tensor depends on the values.*{place}"
    with pytest.raises(DataDependentProgram, match=message), tracing.DataDependenceGuard():
        Picky()(values)
    with tracing.DataDependenceGuard():
        assert Steady()(values).shape == (2,)


def test_a_model_whose_program_depends_on_data_ends_with_3(folder: Path) -> None:
    """Longformer asks the mask for its values. The message names the line in its code."""
    small = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
        "attention_window": 8,
    }  # fmt: skip
    config = transformers.LongformerConfig(**small, vocab_size=200, pad_token_id=3, max_position_embeddings=40)
    transformers.LongformerForMaskedLM(config).save_pretrained(folder / "longformer")
    document = small_runs.document(folder, model={"path": str(folder / "longformer")})
    _, told = preflight(document, folder / "own.yaml", "--accelerator", "v4-8", code=3)
    assert "depends on the values of a tensor, not on its shape alone" in told
    assert "modeling_longformer.py:" in told


def test_stablehlo_of_any_framework_is_compiled() -> None:
    """StableHLO text, as TensorFlow's experimental_get_compiler_ir gives it, for one chip and for 2048 devices."""
    for name in ("v5litepod-1", "v3-2048"):
        compiled = compiler.compile_program(Program(DOUBLED), accelerator(name))
        assert compiled.flops == 256 * 256
        assert compiled.memory.arguments == 4 * 256 * 256
