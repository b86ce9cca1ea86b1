"""The record of a run on disk: settings, metrics, checkpoints and the finished model."""
