"""Pages and comparisons of what runs left."""
