"""The training program of a configuration as preflight traces and compiles it, in figures: for tests. A process of its
own, because torch_xla then simulates the devices of a slice.

    python -m tests.container.traced_step CONFIG ACCELERATOR      prints one JSON object
"""

import json
import math
import re
import sys
from typing import Any

from jaxlib.xla_client import _xla

from training.accelerators import accelerator
from training.config import load
from training.preflight.compiler import compile_program
from training.preflight.programs import list_graphs, read_facts, trace_programs


def describe(path: str, name: str) -> dict[str, Any]:
    """What the claims of the tests are about."""
    config, target = load(path), accelerator(name)
    facts = read_facts(config)
    traced = trace_programs(config, facts, list_graphs(config, facts), target)[0]
    text = traced.program.stablehlo
    signature = next(line for line in text.splitlines() if "func.func" in line and "@main" in line)
    inputs, _, outputs = signature.partition(") -> ")
    sizes = [_bytes(shape) for shape in re.findall(r"%arg\d+: tensor<([^>]*)>", inputs)]
    compiled = _xla.HloModule.from_serialized_hlo_module_proto(
        compile_program(traced.program, target).module
    ).to_string()
    local = re.search(r"entry_computation_layout=\{.*->\((.*)\)\}", compiled)
    dimensions = re.findall(r"[a-z]\w*\[([\d,]*)\]", local.group(1).replace(" ", ""))
    return {
        "overwritten": [int(number) for number in re.findall(r"\{\d+\}: \((\d+), \{\}, may-alias\)", compiled)],
        "donated_bytes": sum(sizes[number] for number in traced.program.donated),
        "resident_bytes": traced.resident_bytes,
        "output_shapes": [shape.rpartition("x")[0] for shape in re.findall(r"tensor<([^>]*)>", outputs)],
        "local_output_shapes": [dims.replace(",", "x") for dims in dimensions],
        "free_outputs": _free_outputs(text),
        "exact_products": len(re.findall(r"dot_general.*HIGHEST, HIGHEST", text)),
        "products": text.count("stablehlo.dot_general"),
        "sums_over_two_axes": len(re.findall(r"dot_general.*contracting_dims = \[0, 1\] x \[0, 1\]", text)),
        "types_of_products": sorted(set(re.findall(r"dot_general.*-> tensor<[^>]*x(\w+)>", text))),
    }


def _free_outputs(text: str) -> int:
    """Outputs whose layout over the devices the program leaves to the compiler."""
    main = text.partition("@main(")[2]
    returned = re.findall(r"%[\w#:]+", next(line for line in main.splitlines() if line.strip().startswith("return")))
    pinned = set(re.findall(r'(%\w+) = stablehlo\.custom_call @Sharding\(.*sharding = "\{replicated\}"', main))
    return len([name for name in returned if name not in pinned])


def _bytes(shape: str) -> int:
    """Of "8x32xf32"."""
    *dims, dtype = shape.split("x")
    width = re.search(r"\d+", dtype)
    return math.prod(map(int, dims)) * (int(width.group()) if width else 8) // 8


if __name__ == "__main__":
    print(json.dumps(describe(*sys.argv[1:3])))
