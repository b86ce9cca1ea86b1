"""Checks of this machine, and of the connections between machines, before a run."""
