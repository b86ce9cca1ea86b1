"""Measurements during a run."""
