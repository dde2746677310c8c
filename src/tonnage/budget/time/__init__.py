"""The seconds of a training step: kernels, links, drives and the optimizer."""
