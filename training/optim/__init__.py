"""Optimizers, each with its configuration and a half for each framework, and the learning rate's schedule."""
