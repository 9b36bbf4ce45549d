"""Cached steps beside traced ones, on eight virtual devices: for a test.

python -m tests.virtual_tpu.cached_steps FOLDER        prints one JSON object
"""

import json
import os
import sys
from pathlib import Path

from tests.container.test_step_cache import count_traces, open_run, settings, trace_always, train
from training.backends.torch_xla.step_cache import FIRST_TRACED
from training.batch import Signals


def compare(folder: Path) -> dict[str, object]:
    """Returns whether results and state are the same bits, and whether only the first four of six steps were traced."""
    config = settings(folder, train__on_nonfinite="skip")
    results, state = train(config)
    traced_results, traced_state = train(config, trace_always)
    backend, batches, _ = open_run(config)
    with count_traces(backend) as traced:
        for number, batch in enumerate(batches):
            backend.step(number, batch.arrays, Signals()).result()
    same = {"same_results": results == traced_results, "same_state": state == traced_state}
    return {"devices": backend.devices, **same, "traced": len(traced) == FIRST_TRACED, "jax": "jax" in sys.modules}


if __name__ == "__main__":
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v3-8")
    print(json.dumps(compare(Path(sys.argv[1]))))
