"""How a batch becomes gradients, and gradients new parameters."""
