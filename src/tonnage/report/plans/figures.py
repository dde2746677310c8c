"""A training plan as JSON values with stable keys. Sizes are in bytes, times in seconds."""

from dataclasses import asdict, replace
from typing import Any

from tonnage import __version__
from tonnage.budget.loading import training_loading
from tonnage.budget.training.objectives import NEXT_TOKEN
from tonnage.ledger import Ledger
from tonnage.planner.training.offers import Offer
from tonnage.planner.training.reasons import Reason
from tonnage.planner.training.remedies import Remedy
from tonnage.planner.training.search import PlanSearch, TrainingPlan
from tonnage.report.campaign import NONE, Campaign, campaign_figures
from tonnage.report.lines import picked
from tonnage.report.plans.notes import frozen_bytes, loading_figures, objective_figures

_PLAN = (
    "tight total_bytes total_range_bytes:range_bytes peak_allocated_bytes peak_reserved_bytes stages peak_moment:moment "
    "host_bytes pinned_bytes step_time_s:step_s step_parts_s:parts_s hidden_s tokens_per_s sequences_per_s"
)
_KEYS = "parameters gradients optimizer activations workspace context fragmentation".split()


def plan_figures(
    findings: PlanSearch,
    reasons: list[Reason],
    remedies: list[Remedy],
    offers: list[Offer],
    seconds: float,
    campaign: Campaign = NONE,
) -> dict[str, object]:
    """Return everything in the report. `best` is the closest plan if none fits."""
    cluster, shape = findings.cluster, findings.shape
    names = "name architecture parameters active_parameters trained_parameters exact"
    counts = picked(findings, "configurations:searched looked_at fitting") | {"seconds": seconds}
    whole = campaign_figures(findings.closest, campaign, gpus=cluster.gpus) if findings.fits else {}
    return {
        "tonnage": __version__,
        **picked(findings, "fits capacity_bytes:cluster.gpu.memory_bytes"),
        "model": picked(shape, names),
        "cluster": picked(cluster, "gpu:gpu.key gpus gpus_per_host hosts host:host.name"),
        "loading": loading_figures(training_loading(shape, findings.closest.configuration, cluster), cluster),
        "best": one_figures(findings.closest) | whole,
        "alternatives": [one_figures(plan) for plan in findings.alternatives],
        "offers": [
            picked(offer, "change flag gain other_numbers:numbers") | {"plan": one_figures(offer.plan)}
            for offer in offers
        ],
        "fastest": one_figures(findings.fastest) if findings.fastest else None,
        "front": [one_figures(plan) for plan in findings.front],
        "rejected": [asdict(reason) for reason in reasons],
        "remedies": [asdict(remedy) for remedy in remedies],
        "searched": counts,
    }


def one_figures(plan: TrainingPlan) -> dict[str, Any]:
    """Return one plan."""
    plain = replace(plan.configuration, objective=NEXT_TOKEN)
    return {
        "config": asdict(plain) | objective_figures(plan) | {"offload": plan.offload.words},
        "fits": plan.fits,
        "ledger": ledger_figures(plan.ledger, plan.total_bytes),
        **picked(plan, _PLAN),
        "samples_per_s": plan.samples / plan.step_s,
        "frozen_bytes": frozen_bytes(plan),
        "terms": [
            picked(term, "category name size_bytes formula numbers source")
            | {
                "size_bytes": round(float(term.size_bytes)),
                "numbers": {name: _number(n) for name, n in term.numbers.items()},
            }
            for term in plan.terms
        ],
    }


def _number(value: Any) -> str | float:
    return value if isinstance(value, str) else float(value)


def ledger_figures(ledger: Ledger, total_bytes: int) -> dict[str, int]:
    """Return bytes by category; categories without a key count as workspace."""
    figures = dict.fromkeys((f"{key}_bytes" for key in _KEYS), 0)
    for category, size in ledger.bytes_by_category.items():
        key = str(category).removesuffix("_states")
        figures[f"{key if key in _KEYS else 'workspace'}_bytes"] += size
    return figures | {"total_bytes": total_bytes}
