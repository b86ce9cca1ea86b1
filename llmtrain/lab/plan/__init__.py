"""The memory and the time that a run would need."""
