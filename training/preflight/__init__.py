"""Preflight: compiles the programs of a run with the TPU compiler on a machine without a TPU.

search            the procedure, with the search for the largest batch
programs          lists the programs of a run and traces them from the backend's own step
compiler          compiles a program: facts of its executable, or a refusal
hlo               reads the text of a compiled program: memory by place in the model, collectives
report            the results as data, text and JSON
checked_programs  compares the programs of a run with those that preflight compiled
"""
