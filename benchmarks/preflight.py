"""Compares the trainer's step with Hugging Face's own, both compiled by the TPU compiler in this run, without a TPU.

    make benchmark NAME=preflight [ARGS="--json --only 'bert-large 512 v3-8'"]

Ours is what `tpu-train preflight` compiles: the trainer's own step. Theirs is the unmodified BertForMaskedLM with its
loss over all positions ("eager" attention, bf16 autocast) and torch.optim.AdamW, data-parallel by SPMD, the state
donated as torch_xla does it. Both with dropout 0.1 and 30,522 tokens.

FLOPs are the compiler's count for one device, divided by its sequences. Where their step is refused for lack of memory,
its work is shown twice: that of its first step at the same batch, which makes AdamW's moments instead of reading them
(it fits because the compiler rematerializes much), and that of the step at half the batch, where nothing is
rematerialized. "Llama-3-8B" is its shape with all weights trained, in bf16 with AdamW in fp32, the state split over all
devices; its layers run as a scan, and it is traced without weights. "LoRA" trains adapters of rank 16 beside all of its
linear layers instead. There is no peer: HBM stands beside the capacity. Its time is the compiler's estimate of the
operations alone. "ModernBERT-base" has rows of 8,192 tokens, four a device with ours; transformers' own ("sdpa"
attention) is given one a device.

Temporaries, alone and with weights and moments, are bytes of HBM of one device; for a step that is
refused, they are the compiler's figure for what it needs. All-reduces of the compiled program are shown beside the
parameters, whose gradients they add up. The first case also has a row for `train.remat: layers` at twice its batch.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.compiling import make_run, run_in_process
from benchmarks.peers.rows import Row, finish, row
from training.accelerators import accelerator
from training.config import TrainerConfig
from training.preflight.compiler import CompilationRefused, Program, compile_program
from training.preflight.programs import DataFacts, Graph, trace_programs
from training.preflight.report import explain_refusal

RUNS_IN = "torch-xla"
VOCABULARY = 30_522
GIB = 2**30
PEER = "unmodified Hugging Face step"
LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

MODERNBERT_BASE = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForMaskedLM"],
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "pad_token_id": 50283,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """A model on a slice."""

    model: str
    length: int
    batch: int  # global
    accelerator: str
    flops: float | None = None  # goals, as ratios to the peer
    temporaries: float | None = None
    lora: int | None = None  # rank of adapters beside all linear layers
    layers: int | None = None  # instead of the model's

    def __str__(self) -> str:
        lora = " LoRA" if self.lora else ""
        return f"{self.model}{lora} {self.length} {self.accelerator}"


CASES = [
    Case("bert-large", 512, 128, "v3-8", 0.92, 0.6),
    Case("bert-large", 512, 128, "v4-8"),
    Case("bert-large", 512, 128, "v4-32"),
    Case("bert-base", 128, 256, "v3-8", 0.84),
    Case("bert-base", 512, 256, "v3-8"),
]
DOUBLE = Case("bert-large", 512, 256, "v3-8")
DECODERS = [Case("Llama-3-8B", 4096, rows, name) for name, rows in (("v5p-16", 8), ("v6e-8", 8), ("v4-64", 32))]
LONG, ONE_ROW = (Case("ModernBERT-base", 8192, rows, "v5litepod-8") for rows in (32, 8))
DECODERS += [Case("Llama-3-8B", 4096, rows, name, lora=16) for name, rows in (("v6e-8", 8), ("v5litepod-16", 16))]


@dataclass(frozen=True)
class StepCosts:
    """The compiler's figures for a step. A refused step has no work and no exchange, only the temporaries that it would
    need."""

    flops: float | None  # TFLOP a sequence
    temporaries: float | None  # GiB
    total: float | None  # GiB
    exchanged: float | None = None  # million numbers that all-reduces add up

    @property
    def fits(self) -> bool:
        """Returns whether the compiler accepted the step."""
        return self.flops is not None


def compile_step(program: Program, case: Case, state: int) -> StepCosts:
    """Compiles a step. `state`: bytes of weights and moments."""
    target = accelerator(case.accelerator)
    try:
        compiled = compile_program(program, target)
    except CompilationRefused as error:
        needed, reason = explain_refusal(str(error))
        print(f"  {case}: {reason}", file=sys.stderr, flush=True)
        return StepCosts(None, (needed - state) / GIB if needed else None, needed / GIB if needed else None)
    all_reduces = [item for item in compiled.collectives if item.kind == "all-reduce"]
    return StepCosts(
        flops=compiled.flops / (case.batch / target.devices) / 1e12,
        temporaries=compiled.memory.temporaries / GIB,
        total=(compiled.memory.total - compiled.memory.code) / GIB,
        exchanged=sum(item.elements for item in all_reduces) / 1e6,
    )


def compile_ours(case: Case, parameters: int, **train: Any) -> StepCosts:
    """Compiles the trainer's step."""
    config, facts = make_run(case.model, case.length, VOCABULARY, case.batch, **train)
    graph = Graph("training", case.batch, case.length)
    [traced] = trace_programs(config, facts, [graph], accelerator(case.accelerator))
    return compile_step(traced.program, case, 12 * parameters)


def compile_theirs(case: Case, *, first: bool = False) -> tuple[StepCosts, int]:
    """Compiles Hugging Face's model and torch's optimizer. Also returns the number of parameters."""
    program, parameters = trace_theirs(case, first=first)
    return compile_step(program, case, 12 * parameters), parameters


def trace_theirs(case: Case, *, first: bool = False) -> tuple[Program, int]:
    """Traces Hugging Face's model and torch's optimizer: the first step, or one that reads the moments. Also returns
    the number of parameters."""
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as spmd
    from transformers import AutoConfig, AutoModelForMaskedLM

    from training.backends.torch_xla import internals, tracing

    devices = accelerator(case.accelerator).devices
    internals.simulate_devices(devices)
    device, mesh = torch_xla.device(), spmd.Mesh(np.arange(devices), (devices,), ("data",))
    with torch.device("meta"):
        if case == ONE_ROW:
            shape = AutoConfig.for_model(**MODERNBERT_BASE, reference_compile=False)
            network = AutoModelForMaskedLM.from_config(shape, attn_implementation="sdpa")
        else:
            network = AutoModelForMaskedLM.from_config(bert_config(case), attn_implementation="eager")
    network = network.to_empty(device="cpu").train().to(device)  # the values of the weights do not matter
    network.tie_weights()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    state = dict(network.named_parameters())
    if not first:
        for name, value in list(state.items()):
            moments = {moment: torch.empty(value.shape).to(device) for moment in ("exp_avg", "exp_avg_sq")}
            optimizer.state[value] = {"step": torch.tensor(1.0), **moments}
            state |= {f"{name}/{moment}": tensor for moment, tensor in moments.items()}
    for tensor in state.values():
        spmd.mark_sharding(tensor, mesh, (None,) * tensor.ndim)

    def send(tensor: Any) -> Any:
        return xm.send_cpu_data_to_device([tensor], device, input_sharding=spmd.ShardingSpec(mesh, ("data", None)))[0]

    ids = torch.zeros(case.batch, case.length, dtype=torch.long)
    # A tensor that was moved, and not computed yet, has no buffer of its own: the one that it comes from counts.
    state_buffers = {internals.handles(internals.arguments_of([value]))[0]: name for name, value in state.items()}
    inputs = {name: send(ids) for name in ("input_ids", "attention_mask", "labels")}
    with torch.autocast("xla", dtype=torch.bfloat16):
        loss = network(**inputs).loss
    loss.backward()
    optimizer.step()
    parameters = sum(value.numel() for value in network.parameters())
    moments_made = []
    if first:
        moments_made = [kept[moment] for kept in optimizer.state.values() for moment in ("exp_avg", "exp_avg_sq")]
    program = tracing.extract_program([loss.detach(), *state.values(), *moments_made], state_buffers)
    return program, parameters


def bert_config(case: Case) -> Any:
    """Returns transformers' configuration of a BERT."""
    from transformers import BertConfig

    hidden, layers, heads, wide = {"bert-base": (768, 12, 12, 3072), "bert-large": (1024, 24, 16, 4096)}[case.model]
    return BertConfig(
        hidden_size=hidden,
        num_hidden_layers=case.layers or layers,
        num_attention_heads=heads,
        intermediate_size=wide,
        vocab_size=VOCABULARY,
    )


def compare_steps(case: Case) -> list[Row]:
    """Returns the rows of one case."""
    print(f"{case}: {PEER}", file=sys.stderr, flush=True)
    theirs, parameters = run_in_process(compile_theirs, case)
    works = [(PEER, theirs.flops)]
    if not theirs.fits:
        half = replace(case, batch=case.batch // 2)
        works = []
        for smaller, label, first in ((case, "its first step", True), (half, "at half the batch", False)):
            print(f"{smaller}: {PEER}, {label}", file=sys.stderr, flush=True)
            works.append((f"{PEER}, {label}", run_in_process(compile_theirs, smaller, first=first)[0].flops))
    print(f"{case}: ours", file=sys.stderr, flush=True)
    ours = run_in_process(compile_ours, case, parameters)
    limit = f"ours at most {_capacity(case):.2f} GiB" + ("" if theirs.fits else "; theirs is refused")
    tied = "1 to 1.3: a tied weight's parts may go apart"
    name = _name(case)
    return [
        *(row(f"{name}: work", "TFLOP a sequence", ours.flops, peer, work, _goal(case.flops)) for peer, work in works),
        row(
            f"{name}: temporaries", "GiB a device", ours.temporaries, PEER, theirs.temporaries, _goal(case.temporaries)
        ),
        row(f"{name}: with state", "GiB a device", ours.total, PEER, theirs.total, limit),
        row(f"{name}: all-reduce", "million numbers", ours.exchanged, "parameters", parameters / 1e6, tied),
    ]


def _name(case: Case) -> str:
    return f"{case.model}{' LoRA' if case.lora else ''}, {case.length} tokens, {case.batch} on {case.accelerator}"


def _capacity(case: Case) -> float:
    """Returns the GiB of HBM of a device."""
    return accelerator(case.accelerator).generation.usable_hbm_bytes_per_device / GIB


def _goal(goal: float | None) -> str:
    return f"at most {goal}" if goal else "none"


def compile_with_remat(case: Case) -> list[Row]:
    """Returns the row of the same model with whole layers recomputed, at twice the batch."""
    print(f"{case}: ours with train.remat: layers", file=sys.stderr, flush=True)
    ours = run_in_process(compile_ours, case, 0, remat="layers")
    total = ours.total if ours.fits else None
    goal = "accepted: within the capacity"
    return [row(f"{_name(case)}, remat: layers", "GiB a device", total, "capacity", _capacity(case), goal)]


def make_large_run(case: Case, **train: Any) -> tuple[TrainerConfig, DataFacts]:
    """Returns the run of a decoder, whose state is split over all devices, or of long rows, and its data's facts."""
    if case == LONG:
        return make_run(MODERNBERT_BASE, case.length, 50_368, case.batch, **train)
    lora = {"rank": case.lora} if case.lora else None
    mesh = {"fsdp": accelerator(case.accelerator).devices}
    return make_run(LLAMA_3_8B, case.length, 128_256, case.batch, lora, mesh=mesh, **train)


def compile_decoder(case: Case) -> dict[str, float]:
    """Compiles the step of a decoder of 8 billion parameters. Returns figures of one device, by name."""
    target = accelerator(case.accelerator)
    config, facts = make_large_run(case)
    [traced] = trace_programs(config, facts, [Graph("training", case.batch, case.length)], target)
    try:
        compiled = compile_program(traced.program, target)
    except CompilationRefused as error:
        needed, reason = explain_refusal(str(error))
        print(f"  {case}: {reason}", file=sys.stderr, flush=True)
        return {"HBM, refused": needed / GIB} if needed else {}
    memory = compiled.memory
    return {
        "HBM": memory.total / GIB,
        "state and inputs": memory.arguments / GIB,
        "temporaries": memory.temporaries / GIB,
        "operations of a step, estimated": compiled.cycles / target.generation.clock_hertz,
        **{item.kind: item.bytes / GIB for item in compiled.collectives},
        "traced here in": traced.seconds,
        "compiled here in": compiled.seconds,
    }


def compile_long_rows(**train: Any) -> tuple[float, float]:
    """Compiles the trainer's step of ModernBERT. Returns the GiB of HBM a device, and the seconds of a step as the
    compiler estimates its operations."""
    config, facts = make_large_run(LONG, **train)
    target = accelerator(LONG.accelerator)
    [traced] = trace_programs(config, facts, [Graph("training", LONG.batch, LONG.length)], target)
    compiled = compile_program(traced.program, target)
    return compiled.memory.total / GIB, compiled.cycles / target.generation.clock_hertz


def describe_long_rows() -> list[Row]:
    """Returns the rows of ModernBERT: ours, and what transformers' own step needs for a quarter of the rows."""
    rows = []
    for label, train in (("", {}), (", remat: layers", {"remat": "layers"})):
        print(f"{LONG}{label}: ours", file=sys.stderr, flush=True)
        memory, seconds = run_in_process(compile_long_rows, **train)
        name = f"{_name(LONG)}{label}"
        rows.append(row(f"{name}: HBM", "GiB a device", memory, "capacity", _capacity(LONG), "within it"))
        rows.append(row(f"{name}: operations of a step, estimated", "s", seconds, "none", None, "none"))
    print(f"{ONE_ROW}: {PEER}", file=sys.stderr, flush=True)
    theirs, _ = run_in_process(compile_theirs, ONE_ROW)
    needed = f"{PEER}, {ONE_ROW.batch} rows"
    rows.append(row(f"{_name(LONG)}: HBM", "GiB a device", rows[0]["ours"], needed, theirs.total, "theirs is refused"))
    return rows


def describe_decoder(case: Case) -> list[Row]:
    """Returns the rows of a decoder."""
    print(f"{case}: the state split over all devices", file=sys.stderr, flush=True)
    rows = []
    for figure, value in run_in_process(compile_decoder, case).items():
        is_hbm, is_time = figure.startswith("HBM"), figure.endswith(("estimated", "here in"))
        peer = ("capacity", _capacity(case), "within it") if is_hbm else ("none", None, "none")
        rows.append(row(f"{_name(case)}: {figure}", "s" if is_time else "GiB a device", value, *peer))
    return rows


def main() -> None:
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--only",
        metavar="CASE",
        action="append",
        choices=[*map(str, [*CASES, *DECODERS, LONG])],
        help=", ".join(map(str, [*CASES, *DECODERS, LONG])),
    )
    options = parser.parse_args()
    os.environ["PJRT_DEVICE"] = "CPU"
    rows: list[Row] = []
    for case in CASES:
        if not options.only or str(case) in options.only:
            rows += compare_steps(case)
            rows += compile_with_remat(DOUBLE) if case == CASES[0] else []
    for case in DECODERS:
        rows += describe_decoder(case) if not options.only or str(case) in options.only else []
    rows += describe_long_rows() if not options.only or str(LONG) in options.only else []
    finish("preflight", rows, options.json)


if __name__ == "__main__":
    main()
