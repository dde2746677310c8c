"""Tensors kept on the host or on disk, and the copies between."""
