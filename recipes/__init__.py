"""Recipes, each a complete training job on one page.

An installed package has them in ``llmtrain.recipes``.
"""
