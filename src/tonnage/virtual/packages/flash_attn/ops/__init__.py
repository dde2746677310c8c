"""A part of the stand-in of flash-attn."""
