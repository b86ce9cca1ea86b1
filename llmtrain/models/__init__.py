"""Tokens -> loss."""
