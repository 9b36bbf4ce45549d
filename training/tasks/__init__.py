"""What a batch, a loss and a metric are. A task is framework-free; the arithmetic of its loss is in each backend.

task: what the loop asks of a task, and what tasks have in common. mlm, classification: the tasks.
"""
