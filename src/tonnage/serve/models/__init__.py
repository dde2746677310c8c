"""Decoder-only language models by structure: what a config.json describes, its weights, and one forward pass over pages.

`architecture` reads files and needs no torch; everything else does.
"""
