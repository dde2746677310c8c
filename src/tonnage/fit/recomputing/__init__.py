"""Rerun forward passes in backward."""
