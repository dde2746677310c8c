"""Runs a step on the device: inputs, CUDA graphs, the forward pass and sampling."""
