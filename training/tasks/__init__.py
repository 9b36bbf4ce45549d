"""What a batch, a loss and a metric are. A task is framework-free; the arithmetic of its loss is in each backend."""
