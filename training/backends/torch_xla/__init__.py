"""PyTorch/XLA. Beside the files that every backend has:

attention.py, dropout.py    modules that take the place of Hugging Face's
programs/                   steps that are traced for the first batches of a shape, and run by position from then on
gloo.py                     sums across CPU hosts
counters.py                 torch_xla's own counts
tracer.py, tracing.py       the step's program for preflight, not run
lint.py                     what the operations of a step cost on a TPU, for `tpu-train check`
"""
