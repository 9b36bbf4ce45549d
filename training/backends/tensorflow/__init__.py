"""The TensorFlow backend. Beside the files that every backend has:

calls.py       several steps in one call of the program
input.py       batches that the hosts of a tf.distribute strategy read themselves
pod.py         a TPU slice of several hosts: one program on host 0, a worker on every host
lowered.py     lowers the step's program for preflight
model.py       transformers' networks, and transformers.pipeline without torch
"""
