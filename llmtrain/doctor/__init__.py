"""Checks of this machine, and of the way between machines, before a run."""
