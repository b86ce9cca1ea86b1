"""Settings of a recipe: its defaults, overridden by YAML files, the environment and flags."""
