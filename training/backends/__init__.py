"""Frameworks behind one protocol: `protocol.py`, and a folder for each. `training.registry.BACKENDS` names them.

In each folder:

    backend.py                  the protocol's methods, in a few lines each
    step.py                     the whole training step: forward, loss, backward, clipping, learning rate, optimizer
    sharding.py, replicas.py    the devices, and how arrays are laid out over them
    state.py                    names of tensors, loading, snapshots
    model.py                    the network of Hugging Face's transformers, and what is changed in it

compile_cache/ is for any framework on a TPU: compiled programs that outlive the process.
"""
