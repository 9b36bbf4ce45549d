"""`tpu-train check`: what in a training step is slow on XLA devices, found by running a few steps on the CPU.

rules     pure: what the steps did -> findings
steps     the procedure: runs the steps of a configuration or of a user's module
counting  watches a framework by its own counts; PyTorch has more (training/backends/torch_xla/lint.py)
"""
