"""A recording as figures for programs: the keys that scripts rely on. Every size is in bytes, and its key says so."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tonnage import __version__
from tonnage.explain import Advice
from tonnage.recording import Group, Recording
from tonnage.report.campaign import NONE, Campaign
from tonnage.report.host import host_figures
from tonnage.report.step_time import time_figures
from tonnage.report.verdict import verdict_words

LARGEST = 20


def figures_of(answers: Sequence[Recording], advice: Sequence[Advice], campaign: Campaign = NONE) -> dict[str, object]:
    """The figures of the first card; of several cards, each one's in `cards`."""
    each = [card_figures(answer, found, campaign) for answer, found in zip(answers, advice, strict=True)]
    return each[0] | {"cards": each} if len(each) > 1 else each[0]


def card_figures(recording: Recording, advice: Advice, campaign: Campaign = NONE) -> dict[str, Any]:
    """What one card would see."""
    return {
        **_header_figures(recording),
        "fits": recording.fits,
        "verdict": verdict_words(recording.header.outcome, advice.outlook.climb is not None),
        "climbs": asdict(advice.outlook.climb) if advice.outlook.climb else None,
        "outlook": list(advice.outlook.lines),
        "peak_allocated_bytes": recording.peak_allocated_bytes,
        "peak_reserved_bytes": recording.peak_reserved_bytes,
        "peak_process_bytes": recording.peak_process_bytes,
        "unused_at_peak_bytes": recording.unused_at_peak_bytes,
        **time_figures(recording, campaign),
        "ledger": {str(category): size for category, size in recording.ledger().bytes_by_category.items()},
        "peak": _peak_figures(recording),
        "phases": {phase.name: phase.peak_allocated_bytes for phase in recording.phases},
        "steps": [asdict(step) for step in recording.steps],
        "largest": [_group_figures(group) for group in recording.largest(LARGEST)],
        "host": host_figures(recording.host),
        "oom": _oom_figures(recording),
        "fixes": [asdict(fix) for fix in advice.fixes],
        "larger_card": advice.larger_card,
        "total": asdict(advice.total) if advice.total else None,
        "stand_ins": [asdict(stand_in) for stand_in in recording.stand_ins],
        "not_modelled": [asdict(note) for note in recording.notes if note.kind == "not_modelled"],
        "assumptions": [asdict(note) for note in recording.notes if note.kind == "assumption"],
    }


def _header_figures(recording: Recording) -> dict[str, Any]:
    header = asdict(recording.header)
    return {
        "tonnage": __version__,
        "outcome": header.pop("outcome"),
        "gpu": header.pop("gpu_name"),
        "gpu_key": header.pop("gpu"),
        **header,
    }


def _peak_figures(recording: Recording) -> dict[str, Any] | None:
    at = recording.peak_allocation
    keys = ("step", "phase", "line", "stack", "module", "operator")
    return {key: getattr(at, key) for key in keys} if at else None


def _group_figures(group: Group) -> dict[str, Any]:
    return asdict(group) | {"category": str(group.category)}


def _oom_figures(recording: Recording) -> dict[str, Any] | None:
    return asdict(recording.oom) if recording.oom else None
