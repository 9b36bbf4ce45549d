"""What a trainer says on a machine without a TPU, whichever framework it uses."""

import re
from pathlib import Path

from tests.container import small_runs

# Accelerator type -> what libtpu says. Without hardware it takes the machine for a v2, which has no configuration named
# as later generations' are.
MESSAGES = {
    "v3-8": "No .* device found",
    "v4-8": "Failed to get global TPU topology",
    "v6e-8": "Failed to get global TPU topology",
}


def require_one_message(folder: Path, backend: str, accelerator_type: str) -> None:
    """Trains in `folder`, and requires that it ends with one message that holds libtpu's own, and no traceback."""
    config = small_runs.document(small_runs.prepare(folder), backend=backend)
    variables = {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": accelerator_type}
    [trainer] = small_runs.start(folder, "no-chips", config, **variables)
    assert trainer.finish(700) == 1, trainer.text()
    reason = MESSAGES[accelerator_type]
    message = f"tpu-train: error: the TPU of this host could not be initialised: .*{reason}.*; check that"
    assert len(re.findall(message, trainer.text())) == 1, trainer.text()
    assert "Traceback" not in trainer.text()
