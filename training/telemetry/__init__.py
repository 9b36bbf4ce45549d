"""Reports of a run: at the terminal, to trackers, and on a page that opens without a network.

metrics        Tracker, a Protocol, MetricsLog, which passes numbers to trackers, and JSON lines, every run's tracker
trackers       TensorBoard, Weights & Biases and MLflow
writer         the thread of host 0 that writes metrics
host_progress  seconds by phase, and the line of progress of this host (progress_line)
attempts       records of how each attempt began and ended
console        prints on host 0; formats the progress line and the summary
html           report.html, with the charts of svg
"""
