"""A recording as JSON values with stable keys. Every size is in bytes, and its key says so."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tonnage import __version__
from tonnage.explain import Advice
from tonnage.recording import Recording
from tonnage.report.campaign import NONE, Campaign
from tonnage.report.lines import picked
from tonnage.report.runs.host import host_figures
from tonnage.report.runs.total import verdict_words
from tonnage.report.step_time import time_figures

LARGEST = 20


def figures_of(answers: Sequence[Recording], advice: Sequence[Advice], campaign: Campaign = NONE) -> dict[str, object]:
    """Return the values of the first GPU; with several GPUs, each one's are in `cards`."""
    each = [card_figures(answer, found, campaign) for answer, found in zip(answers, advice, strict=True)]
    return each[0] | {"cards": each} if len(each) > 1 else each[0]


def card_figures(recording: Recording, advice: Advice, campaign: Campaign = NONE) -> dict[str, Any]:
    """Return what one GPU would see."""
    at, header = recording.peak_allocation, asdict(recording.header)
    notes = [asdict(note) for note in recording.notes]
    return {
        "tonnage": __version__,
        "outcome": header.pop("outcome"),
        "gpu": header.pop("gpu_name"),
        "gpu_key": header.pop("gpu"),
        **header,
        "fits": recording.fits,
        "verdict": verdict_words(recording.header.outcome, advice.outlook.climb is not None),
        "climbs": asdict(advice.outlook.climb) if advice.outlook.climb else None,
        "outlook": list(advice.outlook.lines),
        **picked(recording, "peak_allocated_bytes peak_reserved_bytes peak_process_bytes unused_at_peak_bytes"),
        **time_figures(recording, campaign),
        "ledger": {str(category): size for category, size in recording.ledger().bytes_by_category.items()},
        "peak": picked(at, "step phase line stack module operator") if at else None,
        "phases": {phase.name: phase.peak_allocated_bytes for phase in recording.phases},
        "steps": [asdict(step) for step in recording.steps],
        "largest": [asdict(group) | {"category": str(group.category)} for group in recording.largest(LARGEST)],
        "host": host_figures(recording.host),
        "oom": asdict(recording.oom) if recording.oom else None,
        "fixes": [asdict(fix) for fix in advice.fixes],
        "larger_card": advice.larger_card,
        "total": asdict(advice.total) if advice.total else None,
        "stand_ins": [asdict(stand_in) for stand_in in recording.stand_ins],
        "not_modelled": [note for note in notes if note["kind"] == "not_modelled"],
        "assumptions": [note for note in notes if note["kind"] == "assumption"],
    }
