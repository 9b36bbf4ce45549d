"""Optimizers and learning rate schedules.

schedule: the learning rate as a pure function of the step. adamw: hyperparameters, decay rule and bias corrections,
framework-free. adamw_torch, adamw_tf: the update of one framework. `training.registry.OPTIMIZERS` names them.
"""
