"""Regression: one number for each text."""
