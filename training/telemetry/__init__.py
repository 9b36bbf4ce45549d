"""Reports of a run: at the terminal, to trackers, and on a page that opens without a network.

tracker      Tracker, a Protocol, and the registry of its implementations
metrics      MetricsLog, which passes numbers to trackers; JSON lines, the tracker that every run has
writer       the thread of host 0 that writes metrics
tensorboard  the same numbers as TensorBoard's events
services     Weights & Biases and MLflow
phase_timer  seconds by phase
attempts     records of how each attempt began and ended; attempt_end writes the second one
console      prints on host 0; text formats the progress line and the summary
html         report.html, with the charts of svg
"""
