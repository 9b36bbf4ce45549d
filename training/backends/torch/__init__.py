"""What the runtimes of PyTorch share: the step, the state on the host, and the network of a run. Imports no runtime."""
