"""A training plan as JSON values with stable keys. Sizes are in bytes, times in seconds."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from tonnage import __version__
from tonnage.budget.loading import training_loading
from tonnage.budget.terms import Term
from tonnage.budget.training.objectives import NEXT_TOKEN
from tonnage.ledger import Ledger
from tonnage.planner.training.offers import Offer
from tonnage.planner.training.reasons import Reason
from tonnage.planner.training.remedies import Remedy
from tonnage.planner.training.search import PlanSearch, TrainingPlan
from tonnage.report.campaign import NONE, Campaign, campaign_figures
from tonnage.report.output import picked
from tonnage.report.plans.loading import loading_figures
from tonnage.report.plans.objective import frozen_bytes, objective_figures

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
    counts = {"configurations": findings.searched, **picked(findings, "looked_at fitting"), "seconds": seconds}
    whole = campaign_figures(findings.closest, campaign, gpus=cluster.gpus) if findings.fits else {}
    return {
        "tonnage": __version__,
        "fits": findings.fits,
        "capacity_bytes": cluster.gpu.memory_bytes,
        "model": picked(shape, names),
        "cluster": {"gpu": cluster.gpu.key, **picked(cluster, "gpus gpus_per_host hosts"), "host": cluster.host.name},
        "loading": loading_figures(training_loading(shape, findings.closest.configuration, cluster), cluster),
        "best": one_figures(findings.closest) | whole,
        "alternatives": [one_figures(plan) for plan in findings.alternatives],
        "offers": [
            picked(offer, "change flag gain") | {"other_numbers": offer.numbers, "plan": one_figures(offer.plan)}
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
    terms: list[tuple[Term, Mapping[str, Any]]] = [(term, term.numbers) for term in plan.terms]
    return {
        "config": asdict(plain) | objective_figures(plan) | {"offload": plan.offload.words},
        "fits": plan.fits,
        "ledger": ledger_figures(plan.ledger, plan.total_bytes),
        **picked(plan, "tight total_bytes"),
        "total_range_bytes": plan.range_bytes,
        **picked(plan, "peak_allocated_bytes peak_reserved_bytes stages"),
        "peak_moment": plan.moment,
        **picked(plan, "host_bytes pinned_bytes"),
        "step_time_s": plan.step_s,
        "step_parts_s": plan.parts_s,
        **picked(plan, "hidden_s tokens_per_s sequences_per_s"),
        "samples_per_s": plan.samples / plan.step_s,
        "frozen_bytes": frozen_bytes(plan),
        "terms": [
            {
                "category": str(term.category),
                "name": term.name,
                "size_bytes": round(float(term.size_bytes)),
                "formula": term.formula,
                "numbers": {name: n if isinstance(n, str) else float(n) for name, n in numbers.items()},
                "source": term.source,
            }
            for term, numbers in terms
        ],
    }


def ledger_figures(ledger: Ledger, total_bytes: int) -> dict[str, int]:
    """Return bytes by category; categories without a key count as workspace."""
    figures = dict.fromkeys((f"{key}_bytes" for key in _KEYS), 0)
    for category, size in ledger.bytes_by_category.items():
        key = str(category).removesuffix("_states")
        figures[f"{key if key in _KEYS else 'workspace'}_bytes"] += size
    return figures | {"total_bytes": total_bytes}
