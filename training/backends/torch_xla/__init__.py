"""PyTorch/XLA. Beside the files that every backend has:

step_cache.py    caches compiled steps and runs them without tracing again
internals.py     all private names of torch_xla
tracing.py       the step's program for preflight, not run
lint.py          what the operations of a user's module cost on a TPU, for `tpu-train check`
processor.py     tells whether a processor multiplies slowly
splash.py        attention by JAX's kernel for TPUs

Networks, attention and dropout are in training/models/torch: they import no runtime.
"""
