"""What a run tells people: at the terminal, in TensorBoard, and on a page that opens without a network.

It is drawn from what the run has written (training.telemetry.metrics, the records of its attempts); nothing here asks
the device or the step loop.

  report    the progress line and the summary    screen  where host 0 prints them      events  TensorBoard's files
  attempts  how each attempt began and ended     page    report.html, of `charts`
"""
