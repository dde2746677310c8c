"""Why memory ran out, and what would save it."""

from tonnage.explain.fixes import Advice, Fix, advise

__all__ = ["Advice", "Fix", "advise"]
