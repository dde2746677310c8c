"""Decoder-only language models: their config.json, their weights, and one forward pass over KV pages.

`architecture` reads files and needs no torch; everything else does.
"""
