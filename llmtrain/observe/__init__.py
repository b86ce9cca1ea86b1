"""What is measured inside a run."""
