"""`tpu-train check`: runs a few training steps on the CPU and finds what would be slow on XLA devices.

rules     finds problems in the traces of steps; pure
steps     runs the steps of a user's module
"""
