"""TorchTPU (`torch_tpu`): one process a chip, each with its rows of the global batch.

backend.py     the model on this process's chip, its compiled steps, and the copies of its state
processes.py   the process groups of all chips, sums over them, and the slices of a split state
tracing.py     finds the programs of a run without chips, for preflight
compiler.py    compiles a program for a slice that is not there
internals.py   all internal names of torch_tpu
"""
