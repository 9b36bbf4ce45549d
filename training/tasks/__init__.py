"""Tasks: a batch, a loss and the figures of an evaluation. `training.registry.TASKS` names them.

    task.py             the base class of all tasks: opens data, reads ahead
    labelled_rows.py    the data half of tasks on labelled rows: one label a row, batches of a few lengths
    packed_rows.py      the data halves of tasks on rows of one length: masked tokens, and whole documents
    rows_tf.py          the same rows as tf.data datasets
    <task>/task.py      a class over one of these kinds of rows: which labels can be, and the figures
    <task>/torch.py     `sums(network, batch)`: the loss and counts of torch tensors
    <task>/tf.py        the same of TensorFlow tensors

Rows, task and network are independent: a task names its kind of rows and its head in the registry, and the network's
family comes from the configuration.
"""
