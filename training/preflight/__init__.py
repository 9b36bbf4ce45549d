"""Preflight: compiles the programs of a run with the TPU compiler on a machine without a TPU.

shapes     which programs a run has
programs   traces them from the backend's own step
compiler   the TPU compiler, from a program to the executable's facts or a refusal
hlo        reads the text of a compiled program: memory by place in the model, collectives
search     the procedure, with the search for the largest batch
report     the results as data, text and JSON
agreement  compares the programs of a run with those that were checked
"""
