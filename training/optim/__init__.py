"""Optimizers, each with its configuration and a half for each framework, and the learning rate's schedule."""

STACKED = ".*."  # in the name of parameters of several layers in one tensor, whose first axis is that of the layers
