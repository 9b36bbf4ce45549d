"""gcloud for every part of the launcher: `calls` runs it, `errors` interprets its messages, `retry` repeats questions.

The command lines are with those who call it: tpu_vm/commands.py, tpu_vm/queued.py, tpu_vm/inventory.py and
images/artifact_registry.py.
"""
