"""The trainer's step beside Hugging Face's own, both compiled by the TPU compiler in this run, without a TPU.

    make benchmark NAME=preflight [ARGS="--json --only 'bert-large 512 v3-8'"]

Ours is what `tpu-train preflight` compiles: the trainer's own step. Theirs is the unmodified BertForMaskedLM with its
loss over all positions ("eager" attention, bf16 autocast) and torch.optim.AdamW, data-parallel by SPMD, the state
donated as torch_xla does it. Both with dropout 0.1 and 30,522 tokens.

FLOPs are the compiler's count for one device, over its sequences. Where their step is refused for want of memory, its
work is shown twice: that of its first step, which makes AdamW's moments instead of being given them, at the same batch
(the compiler finds room by computing much again), and that of the step at half the batch, where nothing is computed
again. Temporaries, and they with weights and moments, are bytes of HBM of one device; of a step that is refused they
are what the compiler says it needs. All-reduces of the compiled program are shown beside the parameters, whose
gradients they add up. With the first case, what `train.remat: layers` makes of twice its batch.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.compiling import alone, mlm
from benchmarks.peers.rows import Row, finish, row
from training.accelerators import accelerator
from training.preflight import compiler, programs
from training.preflight.compiler import CompilationRefused, CompiledProgram, Program
from training.preflight.hlo import find_collectives
from training.preflight.report import explain_refusal
from training.preflight.shapes import Graph

RUNS_IN = "torch-xla"
VOCABULARY = 30_522
GIB = 2**30
PEER = "unmodified Hugging Face step"


@dataclass(frozen=True)
class Case:
    """A model on a slice."""

    model: str
    length: int
    batch: int  # global
    accelerator: str
    flops: float | None = None  # goals, as ratios to the peer
    temporaries: float | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.length} {self.accelerator}"


CASES = [
    Case("bert-large", 512, 128, "v3-8", 0.92, 0.6),
    Case("bert-large", 512, 128, "v4-8"),
    Case("bert-large", 512, 128, "v4-32"),
    Case("bert-base", 128, 256, "v3-8", 0.84),
    Case("bert-base", 512, 256, "v3-8"),
]
DOUBLE = Case("bert-large", 512, 256, "v3-8")


@dataclass(frozen=True)
class Found:
    """What the compiler made of a step. What it refused has no work and no exchange, and the temporaries that it
    wanted."""

    flops: float | None  # TFLOP a sequence
    temporaries: float | None  # GiB
    total: float | None  # GiB
    exchanged: float | None = None  # million numbers that all-reduces add up

    @property
    def fits(self) -> bool:
        return self.flops is not None


def compiled(program: Program, case: Case, state: int) -> Found:
    """`state`: bytes of weights and moments."""
    target = accelerator(case.accelerator)
    try:
        found: CompiledProgram = compiler.compile_program(program, target)
    except CompilationRefused as error:
        needed, reason = explain_refusal(str(error))
        print(f"  {case}: {reason}", file=sys.stderr, flush=True)
        return Found(None, (needed - state) / GIB if needed else None, needed / GIB if needed else None)
    exchanged = sum(each.elements for each in find_collectives(found.text) if each.kind == "all-reduce")
    total = found.total_bytes - found.code_bytes
    return Found(
        found.flops / (case.batch / target.devices) / 1e12, found.temporary_bytes / GIB, total / GIB, exchanged / 1e6
    )


def ours(case: Case, parameters: int, **train: Any) -> Found:
    """The trainer's step."""
    config, facts = mlm(case.model, case.length, VOCABULARY, case.batch, **train)
    [traced] = programs.trace_programs(
        config, facts, [Graph("training", case.batch, case.length)], accelerator(case.accelerator).devices
    )
    return compiled(traced.program, case, 12 * parameters)


def theirs(case: Case, *, first: bool = False) -> tuple[Found, int]:
    """And the number of parameters. Hugging Face's model and torch's optimizer: the first step, or one for which the
    moments are there."""
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as spmd
    from transformers import BertConfig, BertForMaskedLM

    from training.backends.torch_xla import tracing

    devices = accelerator(case.accelerator).devices
    tracing.simulate_devices(devices)
    hidden, layers, heads, wide = {"bert-base": (768, 12, 12, 3072), "bert-large": (1024, 24, 16, 4096)}[case.model]
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=wide,
        vocab_size=VOCABULARY,
    )
    config._attn_implementation = "eager"
    device, mesh = torch_xla.device(), spmd.Mesh(np.arange(devices), (devices,), ("data",))
    with torch.device("meta"):
        network = BertForMaskedLM(config)
    network = network.to_empty(device="cpu").train().to(device)  # whatever the weights are
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
    given = tracing.tensor_ids(state)
    inputs = {name: send(ids) for name in ("input_ids", "attention_mask", "labels")}
    with torch.autocast("xla", dtype=torch.bfloat16):
        loss = network(**inputs).loss
    loss.backward()
    optimizer.step()
    parameters = sum(each.numel() for each in network.parameters())
    made = [kept[moment] for kept in optimizer.state.values() for moment in ("exp_avg", "exp_avg_sq")] if first else []
    return compiled(
        tracing.extract_program([loss.detach(), *state.values(), *made], given), case, 12 * parameters
    ), parameters


def compared(case: Case) -> list[Row]:
    print(f"{case}: {PEER}", file=sys.stderr, flush=True)
    other, parameters = alone(theirs, case)
    works = [(PEER, other.flops)]
    if not other.fits:
        half = replace(case, batch=case.batch // 2)
        works = []
        for at, told, first in ((case, "its first step", True), (half, "at half the batch", False)):
            print(f"{at}: {PEER}, {told}", file=sys.stderr, flush=True)
            works.append((f"{PEER}, {told}", alone(theirs, at, first=first)[0].flops))
    print(f"{case}: ours", file=sys.stderr, flush=True)
    mine = alone(ours, case, parameters)
    capacity = accelerator(case.accelerator).generation.usable_hbm_bytes_per_device / GIB
    name = f"{case.model}, {case.length} tokens, {case.batch} on {case.accelerator}"
    limit = f"ours at most {capacity:.2f} GiB" + ("" if other.fits else "; theirs is refused")
    return [
        *(
            row(f"{name}: work", "TFLOP a sequence", mine.flops, peer, work, _at_most(case.flops))
            for peer, work in works
        ),
        row(
            f"{name}: temporaries",
            "GiB a device",
            mine.temporaries,
            PEER,
            other.temporaries,
            _at_most(case.temporaries),
        ),
        row(f"{name}: with state", "GiB a device", mine.total, PEER, other.total, limit),
        row(
            f"{name}: all-reduce",
            "million numbers",
            mine.exchanged,
            "parameters",
            parameters / 1e6,
            "1 to 1.3: a tied weight's parts may go apart",
        ),
    ]


def _at_most(goal: float | None) -> str:
    return f"at most {goal}" if goal else "none"


def again(case: Case) -> list[Row]:
    """The same model with whole layers computed again backwards, at twice the batch."""
    print(f"{case}: ours with train.remat: layers", file=sys.stderr, flush=True)
    mine = alone(ours, case, 0, remat="layers")
    capacity = accelerator(case.accelerator).generation.usable_hbm_bytes_per_device / GIB
    name = f"{case.model}, {case.length} tokens, {case.batch} on {case.accelerator}"
    goal = "accepted: within the capacity"
    return [
        row(f"{name}, remat: layers", "GiB a device", mine.total if mine.fits else None, "capacity", capacity, goal)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--only", metavar="CASE", action="append", choices=[*map(str, CASES)], help=f"{', '.join(map(str, CASES))}"
    )
    options = parser.parse_args()
    os.environ["PJRT_DEVICE"] = "CPU"
    found: list[Row] = []
    for case in CASES:
        if not options.only or str(case) in options.only:
            found += compared(case)
            found += again(DOUBLE) if case == CASES[0] else []
    finish("preflight", found, options.json)


if __name__ == "__main__":
    main()
