"""Trains the network of examples/torch-tpu in one process on the CPU: one_process.py EXAMPLE STEPS ROWS"""

import json
import os
import sys

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch without torch_tpu, whose import would look for a TPU

import torch

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from decoder import Decoder, make_batch

    model, losses = Decoder(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(int(sys.argv[2])):
        loss = model(make_batch(step, int(sys.argv[3])))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps(losses))
