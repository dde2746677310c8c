"""Why memory ran out, what would save it, and what grew from one run to another."""

from tonnage.explain.diagnosis import Diagnosis, advice_for, diagnose
from tonnage.explain.diff import compare
from tonnage.explain.fixes import Advice, Finding, Fix, Outlook, advise

__all__ = ["Advice", "Diagnosis", "Finding", "Fix", "Outlook", "advice_for", "advise", "compare", "diagnose"]
