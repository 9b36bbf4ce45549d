"""Masked language modelling: predict tokens that were masked."""
