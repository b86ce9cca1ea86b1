"""The record of a run, which outlives its process."""
