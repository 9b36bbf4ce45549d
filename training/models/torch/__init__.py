"""Networks in PyTorch, for any of its runtimes: no module here imports one.

network.py      built by name, read from a folder, or without weights; predictions on the CPU
attention.py    self-attention in less memory, and computing again what is not kept
dropout.py      dropout without a generator
layer_scan.py   the layers of a decoder as one loop
"""
