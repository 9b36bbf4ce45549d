"""The attempts of a run: `session` is one process's work on it, `start` starts an attempt on every host, `drive`
watches attempts and follows them up with the next, as the budgets allow, and `found` judges one that is there already.

Every attempt is made from the run's specification. A start may be repeated after a crash at any point: containers that
are there already are found again by their names and labels.
"""
