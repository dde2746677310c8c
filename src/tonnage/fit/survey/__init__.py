"""Measure the memory and time of a live training, block by block, on the current device."""
