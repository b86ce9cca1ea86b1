"""What was asked for, the Accelerator that gives it, and the one way out of a process."""
