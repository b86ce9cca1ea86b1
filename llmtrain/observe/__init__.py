"""Measurements inside a run."""
