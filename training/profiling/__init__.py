"""Profiles of a trainer at work: who takes them, and each framework's profiler."""
