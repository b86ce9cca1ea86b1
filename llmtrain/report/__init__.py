"""What runs left, as a page to look at."""
