"""gcloud as every part of the launcher uses it: `calls` runs it, `errors` says what its messages mean.

The command lines are with those who call it: tpu_vm/commands.py, tpu_vm/queued.py, tpu_vm/inventory.py and
images/artifact_registry.py.
"""
