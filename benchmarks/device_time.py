"""Compares the time of a training step by the TPU compiler's own estimate with that of peers, without a TPU.

    make benchmark NAME=device_time [ARGS="--json --only 'bert-large v4-8'"]

libtpu writes estimated cycles into its optimized programs. The time is their sum over a step, at the generation's
clock: of operations alone, without collectives, waiting and Pallas kernels, and never compared with a chip. Ours is the
trainer's own step, and both go through the same compiler in this run, without further flags.

"Llama-3-8B" is its shape with all weights trained, rows of 4,096 tokens, one a device, bf16 with AdamW in fp32, the
state split over all devices. The peer is a plain JAX step of the same mathematics (benchmarks/peers/jax_llama.py). The
layers are a loop in both, so that all 32 are compiled. Temporaries are HBM of one device; traffic is what a device
contributes to collectives. "bert-large" is 512 tokens, bf16, dropout 0.1, beside the unmodified BertForMaskedLM with
torch.optim.AdamW (benchmarks/preflight.py). Its 24 layers are not compiled: 2 and 4 are, and each further layer takes
the difference's half. That is favourable to the peer: with 24, the compiler would compute some of its layers twice to
save memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.compiling import make_run, run_in_process
from benchmarks.peers.rows import Row, finish, row
from benchmarks.preflight import GIB, LLAMA_3_8B, VOCABULARY, Case, trace_theirs
from training.accelerators import accelerator
from training.preflight.compiler import Program, compile_program, set_environment
from training.preflight.programs import Graph, trace_programs

RUNS_IN = "torch-xla"
LLAMA_VOCABULARY = 128_256
LAYERS = 24
DECODERS = [Case("Llama-3-8B", 4096, 8, name) for name in ("v5p-16", "v6e-8")]
ENCODERS = [Case("bert-large", 512, rows, name) for name, rows in (("v3-8", 64), ("v4-8", 128))]


@dataclass(frozen=True)
class Costs:
    """The compiler's figures of a step for one device."""

    milliseconds: float
    temporaries: float  # GiB
    traffic: float  # GiB


def compile_costs(program: Program, case: Case) -> Costs:
    """Compiles a program for the slice."""
    target = accelerator(case.accelerator)
    compiled = compile_program(program, target)
    milliseconds = 1e3 * compiled.cycles / target.generation.clock_hertz
    traffic = sum(item.bytes for item in compiled.collectives)
    return Costs(milliseconds, compiled.memory.temporaries / GIB, traffic / GIB)


def compile_ours(case: Case) -> Costs:
    """Compiles the trainer's step."""
    target = accelerator(case.accelerator)
    if case.model == "Llama-3-8B":
        mesh = {"fsdp": target.devices}
        config, facts = make_run(LLAMA_3_8B, case.length, LLAMA_VOCABULARY, case.batch, mesh=mesh)
    else:
        config, facts = make_run(case.model, case.length, VOCABULARY, case.batch)
        config = config.model_copy(update={"model": config.model.model_copy(update={"layers": case.layers})})
    [traced] = trace_programs(config, facts, [Graph("training", case.batch, case.length)], target)
    return compile_costs(traced.program, case)


def compile_jax(case: Case) -> Costs:
    """Compiles the plain JAX step."""
    set_environment()
    from benchmarks.peers.jax_llama import trace_step

    devices = accelerator(case.accelerator).devices
    return compile_costs(trace_step(LLAMA_3_8B, LLAMA_VOCABULARY, case.batch, case.length, devices), case)


def compile_transformers(case: Case) -> Costs:
    """Compiles Hugging Face's step."""
    return compile_costs(trace_theirs(case)[0], case)


def compare_decoders(case: Case) -> list[Row]:
    """Returns the rows of a decoder."""
    theirs, ours = (run_in_process(compile_, case) for compile_ in (compile_jax, compile_ours))
    name, peer = f"Llama-3-8B, {case.length} tokens, {case.batch} on {case.accelerator}", "plain JAX step"
    return [
        row(f"{name}: time", "ms, estimated", ours.milliseconds, peer, theirs.milliseconds, "at most 1.0"),
        row(f"{name}: temporaries", "GiB a device", ours.temporaries, peer, theirs.temporaries, "none"),
        row(f"{name}: traffic", "GiB a device", ours.traffic, peer, theirs.traffic, "none"),
    ]


def compare_encoders(case: Case) -> list[Row]:
    """Returns the row of an encoder."""
    times = []
    for compile_ in (compile_ours, compile_transformers):
        two, four = (run_in_process(compile_, replace(case, layers=count)).milliseconds for count in (2, 4))
        times.append(two + (four - two) / 2 * (LAYERS - 2))
    ours, theirs = times
    name = f"bert-large, {case.length} tokens, {case.batch} on {case.accelerator}: time"
    return [row(name, "ms, estimated", ours, "unmodified Hugging Face step", theirs, "at most 0.8")]


def main() -> None:
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    names = [f"{case.model} {case.accelerator}" for case in DECODERS + ENCODERS]
    parser.add_argument("--only", metavar="CASE", action="append", choices=names, help=", ".join(names))
    options = parser.parse_args()
    os.environ["PJRT_DEVICE"] = "CPU"
    rows: list[Row] = []
    for case, name in zip(DECODERS + ENCODERS, names, strict=True):
        if options.only and name not in options.only:
            continue
        print(name, file=sys.stderr, flush=True)
        rows += compare_decoders(case) if case in DECODERS else compare_encoders(case)
    finish("device_time", rows, options.json)


if __name__ == "__main__":
    main()
