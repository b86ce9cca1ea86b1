"""Recipes: a whole job on a page each. Those of an installed package are ``llmtrain.recipes``."""
