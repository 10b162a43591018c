"""Experiment trackers: TensorBoard, trackio, Weights & Biases, MLflow (docs/tracking.md)."""
