"""Trains the network of examples/torch-tpu in one process on the CPU: one_process.py EXAMPLE STEPS ROWS"""

import json
import os
import sys
from pathlib import Path

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch without torch_tpu, whose import would look for a TPU

import torch


def train_on_cpu(example: Path, steps: int, rows: int) -> list[float]:
    """Returns the loss of each step."""
    sys.path.insert(0, str(example))
    from decoder import Decoder, make_batch

    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(make_batch(step, rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(json.dumps(train_on_cpu(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
