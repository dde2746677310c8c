"""Rehearse a step to measure its peak, and compare its gradients with the plain model's."""
