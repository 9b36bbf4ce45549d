"""gcloud for every part of the launcher: `calls` runs it and repeats questions, `errors` interprets its messages.

The command lines are with those who call it: tpu_vm/commands.py, tpu_vm/queued.py, tpu_vm/inventory.py and
images/repositories.py.
"""
