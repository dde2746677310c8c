"""Formulas for memory and time over a model's shape, a configuration and a GPU, without torch."""
