"""What torch_xla counts in a process since its start. A run's own share is the difference to what was there when it
began."""

from __future__ import annotations

import torch_xla.debug.metrics as xla_metrics


def compiled() -> tuple[int, float]:
    """Programs that were compiled, and the seconds they took."""
    metric = xla_metrics.metric_data("CompileTime")
    return (int(metric[0]), metric[1] / 1e9) if metric else (0, 0.0)


def transfers() -> dict[str, int]:
    """Graphs that were new, and copies from a device to the host."""
    metric = xla_metrics.metric_data("TransferFromDeviceTime")
    return {
        "graphs": xla_metrics.counter_value("UncachedCompile") or 0,
        "device_to_host_transfers": int(metric[0]) if metric else 0,
    }


def fallbacks() -> dict[str, int]:
    """How often each operation that the device lacks ran on the host."""
    return {name: xla_metrics.counter_value(name) for name in xla_metrics.counter_names() if name.startswith("aten::")}
