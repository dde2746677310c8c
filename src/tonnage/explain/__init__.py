"""Why memory ran out, what would save it, and what grew from one run to another."""

from tonnage.explain.diagnosis import Diagnosis, advice_for, diagnose
from tonnage.explain.diff import Growth, RunDifference, compare
from tonnage.explain.fixes import Advice, Cause, Climb, Finding, Fix, Guilty, Outlook, advise

__all__ = [
    "Advice",
    "Cause",
    "Climb",
    "Diagnosis",
    "Finding",
    "Fix",
    "Growth",
    "Guilty",
    "Outlook",
    "RunDifference",
    "advice_for",
    "advise",
    "compare",
    "diagnose",
]
