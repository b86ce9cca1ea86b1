"""Settings of a recipe: its defaults, overridden by YAML files and flags."""
