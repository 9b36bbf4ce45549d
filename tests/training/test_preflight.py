"""Preflight's pure parts: a run's programs, what a refusal means, the largest batch, the bound, libtpu's texts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from google.protobuf import text_format
from hypothesis import example, given
from hypothesis import strategies as st

from tests.container import small_runs
from tests.processes import run_module
from training.accelerators import GENERATIONS, accelerator
from training.config import TrainerConfig
from training.errors import BadInput
from training.preflight import programs, report, search
from training.preflight.checked_programs import CheckedPrograms
from training.preflight.compiler import CompilerUnavailable, Memory, Program, hash_hlo, require_versions
from training.preflight.hlo import Module, Work, find_origin, read_work
from training.preflight.programs import DataFacts, Graph, TracedProgram, assume_facts, empty_batch, list_graphs
from training.preflight.report import GIB, GraphResult, describe, explain_refusal, roofline
from training.preflight.search import bisect, estimate_edge

CONFIG = TrainerConfig.model_validate(
    small_runs.document(Path(), model={"name": "bert-base"}, train__global_batch_size=64, evaluation__batch_size=16)
)

V3 = accelerator("v3-8")

# libtpu 0.0.21 on BERT, shortened.
REFUSAL = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 22.46G of 15.48G hbm. Exceeded hbm capacity by 6.98G.

Total hbm usage >= 22.97G:
    reserved        530.00M
    program          20.96G
    arguments         1.50G

Largest program allocations in hbm:

  1. Size: 1.50G
     Operator: op_type="aten__softmax" op_name="bert.1/bert.encoder.layer.3.attention.self.2/aten__softmax" \
source_file="/m.py" source_line=12
     Shape: f32[24,16,512,512]{3,2,1,0:T(8,128)}
     Unpadded size: 1.50G
     XLA label: fusion.1 = fusion(...)
     Allocation type: HLO temp
     ==========================

  2. Size: 1.50G
     Operator: op_type="aten__softmax" op_name="bert.1/bert.encoder.layer.4.attention.self.2/aten__softmax" \
source_file="/m.py" source_line=12
     Shape: f32[24,16,512,512]{3,2,1,0:T(8,128)}
     Unpadded size: 1.50G
     ==========================
"""


def test_a_run_has_a_program_for_each_shape_and_bucket() -> None:
    facts = assume_facts(CONFIG, 30522, (128,), None)
    training, evaluation = list_graphs(CONFIG, facts)
    assert (str(training), str(evaluation)) == ("training, 64 x 128", "evaluation, 16 x 128")
    shapes = {name: array.shape for name, array in empty_batch(CONFIG, training, facts).items()}
    assert shapes == {"input_ids": (64, 128), "positions": (64, 20), "labels": (64, 20), "weights": (64, 20)}
    config = CONFIG.model_copy(update={"task": "classification"})
    graphs = map(str, list_graphs(config, assume_facts(config, 30522, (32, 64), 77)))
    assert [*graphs] == ["training, 64 x 64", "training, 64 x 32", "evaluation, 16 x 64", "evaluation, 16 x 32"]


@pytest.mark.parametrize(
    ("task", "lengths", "labels"), [("classification", (32,), None), ("mlm", (32,), 5), ("mlm", (32, 64), None)]
)
def test_assumed_facts_must_fit_the_task(task: str, lengths: tuple[int, ...], labels: int | None) -> None:
    with pytest.raises(BadInput, match=f"task is {task}"):
        assume_facts(CONFIG.model_copy(update={"task": task}), 100, lengths, labels)


OTHER_FORM = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom ... HLO temporaries (51.92G) exceeds available HBM (15.48G)"
DOES_NOT_FIT = "does not fit: it needs {} GiB of HBM a device, and 15.48 GiB are there"


@pytest.mark.parametrize(
    ("refusal", "needed", "told"),
    [
        (REFUSAL, int(22.46 * GIB), DOES_NOT_FIT.format(22.46)),
        (OTHER_FORM, int(51.92 * GIB), DOES_NOT_FIT.format(51.92)),
        ("UNIMPLEMENTED: no such\nat 0x12", None, "the compiler refuses it: UNIMPLEMENTED: no such"),
    ],
)
def test_a_refusal_is_explained(refusal: str, needed: int | None, told: str) -> None:
    assert explain_refusal(refusal) == (needed, told)


def test_equal_allocations_of_a_refusal_are_counted() -> None:
    (allocation,) = report.parse_allocations(REFUSAL)
    assert (allocation.bytes, allocation.count, allocation.shape) == (3 * GIB, 2, "f32[24,16,512,512]")
    assert allocation.where == "bert.encoder.layer.*.attention.self: softmax"


def test_a_tracer_that_fails_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Mock(open=Mock(side_effect=BadInput("no such model")))
    for name in ("load", "require_versions", "prepare_framework", "os"):
        monkeypatch.setattr(programs, name, MagicMock(return_value=lambda *_: tracer))
    facts = assume_facts(CONFIG, 100, (128,), None)
    with pytest.raises(BadInput, match="no such model"):
        programs.trace_programs(CONFIG, facts, list_graphs(CONFIG, facts), V3)
    tracer.close.assert_called_once()


def test_a_program_that_does_not_fit_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = TracedProgram(Graph("training", 128, 512), Program(""), 0, 0.0)
    large, less = (describe(traced, f"Used {size}G of 15.48G hbm.", 1.0, V3) for size in ("22.46", "16.00"))
    trial = search.Trial(CONFIG, assume_facts(CONFIG, 100, (512,), None), accelerator("v4-16"), print)

    def advise(result: GraphResult) -> list[str]:
        monkeypatch.setattr(search.Trial, "compile", lambda *_, **settings: result)
        return [*trial.advise_remat(large), *trial.advise_mesh(large)]

    remat, mesh = "with train.remat: layers it would need 16.00 GiB", "with train.mesh.fsdp: 2 it would need 16.00 GiB"
    assert advise(less) == [remat, "no train.mesh.fsdp up to 8 makes it fit"]
    assert advise(replace(less, fits=True)) == [f"{remat} and fit", f"{mesh} and fit"]


def test_the_largest_batch_fits_beside_the_code_of_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(_config: object, _facts: object, graphs: list[Graph], _target: object) -> list[TracedProgram]:
        return [TracedProgram(graph, Program(str(graph.rows // V3.devices)), 0, 0.0) for graph in graphs]

    def compile_program(program: Program, *_: object) -> Mock:
        memory = Memory(0, 0, 0, int(program.stablehlo) * GIB, 2 * GIB)  # 1 GiB a row, and 2 GiB of code
        return Mock(memory=memory, seconds=1.0, flops=1.0, bytes_accessed=1.0, cycles=1)

    monkeypatch.setattr(search, "trace_programs", trace)
    monkeypatch.setattr(search, "compiler", Mock(compile_program=compile_program, DEEP_STACKS="-"))
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0")
    found = search.run_preflight(CONFIG, DataFacts(9, 0, (512,), (512,), None), [V3], search_batch=True, show=print)
    assert found.accelerators[0].max_batch.rows_per_device == 11


def test_tracing_needs_torch_xla_with_torch_tpus_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [Mock(version="0.0.52")] * (name == "libtpu"))
    with pytest.raises(CompilerUnavailable, match=": torch_xla is not installed"):
        require_versions(tracing=True)


def test_the_estimated_time_is_cycles_at_the_clock_that_gives_a_chip_its_peak() -> None:
    assert report.Costs(1.0, 1.0, "FLOPs", 1.0, cycles=1_500_000, clock_hertz=1.5e9).seconds == pytest.approx(1e-3)
    for generation in GENERATIONS:
        products = generation.bf16_flops_per_chip / generation.clock_hertz / (2 * 128 * 128)  # units of 128 x 128
        assert products == pytest.approx(round(products), rel=0.01), generation.name


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        ({100: 10.0}, None),
        ({100: 10.0, 150: 15.0}, 160),
        ({100: 10.0, 150: 15.0, 200: 20.0}, 160),
        ({100: 15.9, 120: 15.9}, 120),  # the compiler made room: its memory is used up
        ({100: 15.9, 120: 15.8}, 120),
    ],
)
def test_the_edge_is_estimated_from_the_nearest_two_results(needed: dict[int, float], expected: float | None) -> None:
    traced = TracedProgram(Graph("training", 128, 512), Program(""), 0, 0.0)
    known = {rows: describe(traced, f"Used {size:.2f}G of 16.00G hbm.", 1.0, V3) for rows, size in needed.items()}
    assert estimate_edge(known, 16 * GIB) == (expected if expected is None else pytest.approx(expected))


def tries(edge: int, start: int, estimate: Callable[[list[int]], float | None]) -> int:
    """Searches where rows up to `edge` fit, checks that the result is next to the edge, and returns how many tries.
    `estimate` gets the numbers tried so far, `start` included."""
    tried = [start]

    def fits(rows: int) -> bool:
        tried.append(rows)
        return rows <= edge

    good, bad = bisect(fits, start, start <= edge, lambda: estimate(tried))
    assert good <= edge < bad
    assert bad - good <= max(1, bad // 16)
    return len(tried) - 1


@given(st.integers(1, 5000), st.integers(1, 5000), st.floats(0.97, 1.03))
def test_the_search_ends_next_to_the_edge_and_soon_if_the_estimate_is_good(edge: int, start: int, error: float) -> None:
    assert tries(edge, start, lambda _: None) <= 2 * 13
    assert tries(edge, start, lambda _: edge * error) <= 4
    assert bisect(lambda _: False, start, False) == (None, 1), "nothing fits"


@given(st.integers(1, 5000), st.floats(1.0, 3.0))
@example(11, 2.375)
def test_the_search_is_short_if_the_compiler_rematerializes_at_the_edge(full: int, further: float) -> None:
    """Even where memory is full and yet more rows fit, an edge up to three times `full` takes at most 10 tries."""
    edge = int(full * further)
    assert tries(edge, full, lambda tried: max(rows for rows in tried if rows <= edge) * 1.001) <= 10


def test_the_bound_is_the_slower_of_arithmetic_and_memory() -> None:
    v3, v4 = accelerator("v3-8"), accelerator("v4-8")
    assert roofline(61.5e12, 0, v3, 256).examples_per_second == pytest.approx(256)  # half a chip's 123 TFLOP/s
    assert roofline(275e12, 1, v4, 256).bound_by == "FLOPs"
    by_memory = roofline(1, 1228e9, v4, 256)
    assert (by_memory.examples_per_second, by_memory.bound_by) == (pytest.approx(256), "memory bandwidth")


def test_every_generation_has_usable_memory_below_its_size() -> None:
    gibibytes = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}  # of a device
    for generation in GENERATIONS:
        assert 0.9 < generation.usable_hbm_bytes_per_device / GIB / gibibytes[generation.name] < 1.01


def test_the_hash_ignores_names_and_layouts_but_not_shapes() -> None:
    line = '  %add.1 = f32[8,128]{1,0} add(%a, %b), metadata={op_name="x" source_file="y"}\n'
    assert hash_hlo(line) == hash_hlo(line.replace("{1,0}", "{0,1}").replace('"x"', '"z"'))
    assert hash_hlo(line) != hash_hlo(line.replace("8,128", "16,128"))
    assert hash_hlo(line) != hash_hlo(line.replace("add(", "subtract("))


def test_programs_are_compared_only_if_comparable() -> None:
    environment = {"TPU_LAUNCH_PREFLIGHT": "abc,def"}
    assert CheckedPrograms({}, comparable=True, warn=pytest.fail).summary() is None
    not_comparable = CheckedPrograms(environment, comparable=False, warn=pytest.fail)
    not_comparable.compare("training", [(1, 2)], lambda: pytest.fail("nothing is to be compared"))
    assert not_comparable.summary() == "not compared: this backend or machine does not run programs for a whole slice"


def test_a_machine_without_the_compiler_says_so(tmp_path: Path) -> None:
    """This environment has neither jax nor libtpu."""
    (tmp_path / "run.yaml").write_text(
        "model: {name: bert-tiny}\ndata: {train: a, tokenizer: b}\ntrain: {steps: 1, global_batch_size: 8}\noutput: c\n"
    )
    options = ["--accelerator", "v4-8", "--vocabulary", "100", "--sequence-length", "32"]
    ended = run_module("training.cli", tmp_path, "preflight", "run.yaml", *options)
    assert ended.returncode == 2
    assert "preflight needs the TPU compiler: jax is not installed (0.7.1 is needed)" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "file", "place"),
    [
        ("bert.1/bert.pooler.2/bert.pooler.dense.1/aten__mm", "/x/linear.py", "bert.pooler.dense: mm"),
        ("gradient of bert.pooler.dense.7/aten__mm", "/torch/autograd/graph.py", "gradient of bert.pooler.dense: mm"),
        ("gradient of bert.embeddings.7/aten__addcmul", "/x/torch_xla.py", "optimizer: addcmul"),
    ],
)
def test_places_are_the_models_own_names(name: str, file: str, place: str) -> None:
    assert find_origin(f'metadata={{op_name="{name}" source_file="{file}" source_line=1}}') == place
    assert find_origin("no metadata") == ""


F32, BF16, U32 = 11, 16, 8


def read(entry: str, computations: str = "") -> Work:
    """Reads a program of these instructions and computations, in protobuf's text form."""
    module = text_format.Parse(f'entry: 1 computations {{ id: 1 name: "main" {entry} }} {computations}', Module())
    return read_work(module.SerializeToString())


def operation(opcode: str, *arrays: tuple[int, ...], called: Sequence[int] = (), config: str = "") -> str:
    """An instruction. `arrays`: (type, dimensions) of its result, of several if that is a tuple."""
    shapes = [f"type: {kind} dimensions: {dimensions}" for kind, *dimensions in arrays]
    shape = shapes[0] if len(shapes) == 1 else "".join(f"parts {{ {each} }} " for each in shapes)
    return f"instructions {{ opcode: \"{opcode}\" shape {{ {shape} }} called: {list(called)} config: '{config}' }} "


def test_collectives_are_counted_in_elements_and_bytes() -> None:
    reduce, gather = read(
        operation("all-reduce", (BF16, 100, 10), (F32, 7))
        + operation("all-gather-start", (F32, 1, 4), (F32, 8, 4))
        + operation("all-gather-done", (F32, 8, 4))
    ).collectives
    assert (reduce.kind, reduce.count, reduce.elements, reduce.bytes) == ("all-reduce", 1, 1007, 2028)
    assert dict(reduce.dtypes) == {"bf16": 1000, "f32": 7}
    assert (gather.kind, gather.count, gather.elements, gather.bytes) == ("all-gather", 1, 32, 128)


def computation(number: int, name: str, *instructions: str) -> str:
    return f'computations {{ id: {number} name: "{name}" {"".join(instructions)} }} '


CYCLES = '{{"estimated_cycles":"{}"}}'
LIMIT = 'instructions {{ opcode: "constant" literal {{ u32: {} }} }} '
LOOP = (
    operation("fusion", (F32, 1, 4), called=[6], config=CYCLES.format(7))
    + operation("fusion", (F32, 1, 4), called=[6], config=CYCLES.format(2**63 - 1))  # unknown
    + operation("collective-permute-start", (F32, 1, 4), (F32, 1, 4), (U32,), (U32,))
    + operation("while", (F32, 1, 4), called=[3, 5], config='{"known_trip_count":{"n":"32"}}')
    + operation("while", (F32, 1, 4), called=[3, 5]),
    computation(2, "all-reduce-scatter.1", operation("all-reduce", (F32, 8, 4)))
    + computation(
        3, "body", operation("all-gather", (F32, 8, 4)),
        operation("fusion", (F32, 8, 4), called=[6], config=CYCLES.format(100)),
        operation("fusion", (F32, 1, 4), called=[2]),
    )
    + computation(4, "unused", operation("fusion", (F32, 4), called=[6], config=CYCLES.format(1000)))
    + computation(5, "test", LIMIT.format(0), LIMIT.format(3))
    + computation(6, "fused", operation("add", (F32, 4), config=CYCLES.format(50))),
)  # fmt: skip


def test_what_a_loop_does_counts_as_often_as_it_runs() -> None:
    work = read(*LOOP)
    assert work.cycles == 7 + (32 + 3) * 100
    assert (work.loops, read("").loops) == ((7 + 35 * 100) / 207, 1)
    gather, scatter, permutation = work.collectives
    assert (permutation.kind, permutation.bytes) == ("collective-permute", 16)
    assert (gather.kind, gather.count, gather.bytes) == ("all-gather", 35, 35 * 128)
    assert (scatter.kind, scatter.count) == ("reduce-scatter", 35)
