"""Batches + model -> updates."""
