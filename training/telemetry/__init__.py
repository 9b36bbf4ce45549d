"""Reports of a run: at the terminal, to trackers, and on a page that opens without a network.

metrics        Tracker, a Protocol, MetricsLog, which passes numbers to trackers, and JSON lines, every run's tracker
trackers       TensorBoard, Weights & Biases and MLflow
writer         the thread of host 0 that writes metrics
host_progress  seconds by phase, and the line of progress of this host (progress_line)
console        prints on host 0; formats the progress line and the summary
report         records of how attempts began and ended; report.html, with the charts of svg
"""
