"""What is checked before a run starts: inputs, this machine and account, and whether the training step fits."""
