"""A user's script: run as it is, and what it does while memory is taken; on real and virtual GPUs alike."""
