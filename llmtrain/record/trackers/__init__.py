"""Trackers: Weights & Biases, TensorBoard, MLflow, Trackio and whatever else Accelerate logs to."""
