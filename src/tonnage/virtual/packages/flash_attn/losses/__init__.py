"""Part of the stand-in for flash-attn."""
