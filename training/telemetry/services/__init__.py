"""Services that show the numbers of many runs: Weights & Biases, MLflow. None of them can stop or delay training.

guard                what a service fails at is a warning, and is tried again later
weights_and_biases   `telemetry.trackers: [wandb]`
mlflow_tracking      `telemetry.trackers: [mlflow]`
"""
