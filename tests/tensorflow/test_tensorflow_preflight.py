"""`tpu-train preflight` with `backend: tensorflow`: the real TPU compiler compiles TPUStrategy's step of a device."""

import json
from pathlib import Path

from click.testing import CliRunner

from training.cli.main import tpu_train

FILE = """\
task: mlm
backend: tensorflow
model: {name: bert-tiny, hidden_size: 32, layers: 1, heads: 2, max_positions: 32}
data: {train: nowhere, tokenizer: nowhere}
train: {steps: 10, global_batch_size: 64, precision: bf16}
output: nowhere
"""
# Embeddings, the layer, the head.
PARAMETERS = (200 + 32 + 2 + 2) * 32 + 4 * 33 * 32 + 4 * 32 + 33 * 128 + 129 * 32 + (33 + 2) * 32 + 200
SUMS = 3


def test_the_step_is_one_program_that_sums_gradients_over_the_slice(tmp_path: Path) -> None:
    (path := tmp_path / "run.yaml").write_text(FILE)
    shapes = ["--accelerator", "v4-16", "--vocabulary", "200", "--sequence-length", "32"]
    ended = CliRunner().invoke(tpu_train, ["preflight", str(path), *shapes, "--json"])
    assert ended.exit_code == 0, ended.output
    [found] = json.loads(ended.stdout)["accelerators"]
    assert (found["devices"], found["fits"], found["distinct_graphs"]) == (8, True, 1)
    [step] = found["graphs"]
    [gradients] = step["collectives"]
    assert (gradients["kind"], gradients["count"], gradients["elements"]) == ("all-reduce", 1, PARAMETERS + SUMS)
    state, memory = 3 * 4 * PARAMETERS, step["memory"]  # weights and moments
    assert state < memory["donated"] < memory["arguments"] < memory["total"]
    assert memory["resident"] == 0
