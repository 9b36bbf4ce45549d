"""What a batch, a loss and a metric are: a folder for each task, registered in `training.registry.TASKS`.

    task.py             what all tasks have in common: the protocol, opening data, reading ahead
    <task>/task.py      its data half, framework-free: batches, identity, figures, the shapes of its arrays
    <task>/torch.py     `sums(network, batch)`: its loss and counts of torch tensors
    <task>/tf.py        the same of TensorFlow tensors, and its batches as a tf.data dataset

To add a task, write such a folder, and its entry in the registry.
"""
