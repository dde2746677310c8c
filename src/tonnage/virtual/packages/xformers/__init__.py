"""A stand-in for xformers 0.0.35: its attention on torch's operators, as the package itself runs it, and its SwiGLU."""

from . import ops

__version__ = "0.0.35"
__all__ = ["ops"]
