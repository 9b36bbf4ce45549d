"""Tasks: a batch, a loss and the figures of an evaluation. `training.registry.TASKS` names them.

    task.py      the base class of all tasks: opens data, reads ahead
    labels.py    tasks on labelled rows, of a few lengths: which labels can be, and the figures
    tokens.py    tasks that predict tokens, over rows of one length: masked tokens, and whole documents
    torch.py     the loss and counts of each task, of torch tensors
    tf.py        the same of TensorFlow tensors

Rows, task and network are independent: a task names its kind of rows and its head in the registry, and the network's
family comes from the configuration.
"""
