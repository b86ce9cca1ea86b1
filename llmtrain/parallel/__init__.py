"""How weights and gradients are spread over processes."""
