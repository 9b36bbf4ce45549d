"""Causal language modelling: the next token of a document."""
