"""Tells whether this machine's processor multiplies fp32 matrices slowly, for a run that trains on it.

XLA's client for CPUs multiplies by oneDNN, which takes the widest instructions that the processor has. On two cores of
an EPYC with AVX-512, products of BERT-base's layers: 110 GFLOP/s; held to AVX2, 70; to SSE4.1, 20. Plain torch
multiplies by MKL, which did 50 to 90 there with either.
"""

from __future__ import annotations

from pathlib import Path

_AVX_512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX2 = {"avx2", "fma"}


def describe_slow_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Returns a warning for the user if the instructions of the x86 processor that Linux describes in a file make steps
    slow; None if not, or if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    flags = set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
    if not flags or flags >= _AVX_512:
        return None
    has, share = ("AVX2 and no AVX-512", "two thirds") if flags >= _AVX2 else ("no AVX2", "a fifth")
    return f"this processor has {has}: XLA's matrix products run at about {share} of the speed that AVX-512 gives them"
