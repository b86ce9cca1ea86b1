"""The training loop: steps, evaluations, checkpoints and everything around them."""
