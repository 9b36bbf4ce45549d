"""Flags of XLA for tests: tiny models are trained for moments, so compiling fast matters more than fast programs."""

UNOPTIMIZED = "--xla_backend_optimization_level=0"
# Without its newer emitters of fused loops XLA compiles for CPUs in half the time. libtpu does not know that flag.
COMPILE_FAST = f"{UNOPTIMIZED} --xla_cpu_use_fusion_emitters=false"
