"""What a run reports: at the terminal, to trackers, and on a page that opens without a network.

Reports are made of what the run has written; nothing here reads from the device or the step loop.

    tracker      where the numbers of a run go: a Protocol and the registry of its implementations
    metrics      MetricsLog, which passes numbers to trackers; JSON lines, the tracker that every run has
    tensorboard  the same numbers as TensorBoard's events
    services     Weights & Biases and MLflow, which may fail without harm
    phase_timer  seconds by phase
    attempts     records of how each attempt began and ended; attempt_end writes the second one
    console      what host 0 prints; text formats the progress line and the summary
    html         report.html, with the charts of svg
"""
