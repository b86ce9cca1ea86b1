"""The wishes of a person, the Accelerator that gives it, and the one way out of a process."""
