"""Runs a user's script unchanged and observes what it does while memory is allocated, on real and virtual GPUs alike."""
