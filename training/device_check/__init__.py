"""The check of this host's devices: what is measured, by each framework, and what is wrong with it."""
