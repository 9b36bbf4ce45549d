"""Models as files, and as networks in PyTorch (`torch/`). Only `torch/` and predictions need a framework."""
