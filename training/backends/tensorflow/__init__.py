"""TensorFlow. Beside the files that every backend has:

calls.py            several steps in one call of the program
input.py            batches that the hosts of a tf.distribute strategy read for themselves
pod.py, worker.py   a TPU slice of several hosts: one program on host 0, a worker on every host
lowered.py          the step's program for preflight, not run
inference.py        transformers.pipeline without torch
"""
