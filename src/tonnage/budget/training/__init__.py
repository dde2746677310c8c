"""The memory of a training step: what is held, what activations add, and the moment of its peak."""
