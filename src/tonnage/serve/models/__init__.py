"""Decoder-only language models: their config.json, their weights, and one forward pass over KV pages."""
