"""TorchTPU (`torch_tpu`): one process a chip, each with its rows of the global batch.

backend.py       the model on this process's chip, its steps, and sums over all processes
program.py       compiles a step
internals.py     all internal names of torch_tpu
"""
