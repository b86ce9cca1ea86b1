"""Pages about runs, and comparisons between runs."""
