"""Frameworks behind one protocol: `protocol.py`, and a folder for each. `training.registry.BACKENDS` names them.

    placement.py                where each tensor of the state is on the devices
    compile_cache.py            compiled programs that outlive the process, for any framework on a TPU

In each framework's folder:

    backend.py                  the protocol's methods, in a few lines each
    step.py                     the whole training step: forward, loss, backward, clipping, learning rate, optimizer
    sharding.py, replicas.py, processes.py    the devices, how arrays are laid out over them, and a check of them
    state.py                    names of tensors, loading, snapshots (TensorFlow: in backend.py)
"""
