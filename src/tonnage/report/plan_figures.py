"""A training plan as JSON values with stable keys. Sizes are in bytes, times in seconds."""

from dataclasses import asdict, replace
from typing import Any

from tonnage import __version__
from tonnage.budget.loading import training_loading
from tonnage.budget.objectives import NEXT_TOKEN
from tonnage.ledger import Category, Ledger
from tonnage.planner.offers import Offer
from tonnage.planner.reasons import Reason
from tonnage.planner.remedies import Remedy
from tonnage.planner.search import PlanSearch, TrainingPlan
from tonnage.report.campaign import NONE, Campaign, campaign_figures
from tonnage.report.loading import loading_figures
from tonnage.report.objective import frozen_bytes, objective_figures

_KEYS = {
    Category.PARAMETERS: "parameters",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATES: "optimizer",
    Category.ACTIVATIONS: "activations",
    Category.WORKSPACE: "workspace",
    Category.CONTEXT: "context",
    Category.FRAGMENTATION: "fragmentation",
}


def plan_figures(
    findings: PlanSearch,
    reasons: list[Reason],
    remedies: list[Remedy],
    offers: list[Offer],
    seconds: float,
    campaign: Campaign = NONE,
) -> dict[str, object]:
    """Return everything in the report. `best` is the closest plan if none fits."""
    cluster = findings.cluster
    return {
        "tonnage": __version__,
        "fits": findings.fits,
        "capacity_bytes": cluster.gpu.memory_bytes,
        "model": {
            "name": findings.shape.name,
            "architecture": findings.shape.architecture,
            "parameters": findings.shape.parameters,
            "active_parameters": findings.shape.active_parameters,
            "trained_parameters": findings.shape.trained_parameters,
            "exact": findings.shape.exact,
        },
        "cluster": {
            "gpu": cluster.gpu.key,
            "gpus": cluster.gpus,
            "gpus_per_host": cluster.gpus_per_host,
            "hosts": cluster.hosts,
            "host": cluster.host.name,
        },
        "loading": loading_figures(training_loading(findings.shape, findings.closest.configuration, cluster), cluster),
        "best": one_figures(findings.closest)
        | (campaign_figures(findings.closest, campaign, gpus=cluster.gpus) if findings.fits else {}),
        "alternatives": [one_figures(plan) for plan in findings.alternatives],
        "offers": [
            {"change": offer.change, "flag": offer.flag, "gain": offer.gain, "other_numbers": offer.numbers}
            | {"plan": one_figures(offer.plan)}
            for offer in offers
        ],
        "fastest": one_figures(findings.fastest) if findings.fastest else None,
        "front": [one_figures(plan) for plan in findings.front],
        "rejected": [asdict(reason) for reason in reasons],
        "remedies": [asdict(remedy) for remedy in remedies],
        "searched": {
            "configurations": findings.searched,
            "looked_at": findings.looked_at,
            "fitting": findings.fitting,
            "seconds": seconds,
        },
    }


def one_figures(plan: TrainingPlan) -> dict[str, Any]:
    """Return one plan."""
    plain = replace(plan.configuration, objective=NEXT_TOKEN)
    return {
        "config": asdict(plain) | objective_figures(plan) | {"offload": plan.offload.words},
        "fits": plan.fits,
        "ledger": ledger_figures(plan.ledger, plan.total_bytes),
        "tight": plan.tight,
        "total_bytes": plan.total_bytes,
        "total_range_bytes": plan.range_bytes,
        "peak_allocated_bytes": plan.peak_allocated_bytes,
        "peak_reserved_bytes": plan.peak_reserved_bytes,
        "stages": plan.stages,
        "peak_moment": plan.moment,
        "host_bytes": plan.host_bytes,
        "pinned_bytes": plan.pinned_bytes,
        "step_time_s": plan.step_s,
        "step_parts_s": plan.parts_s,
        "hidden_s": plan.hidden_s,
        "tokens_per_s": plan.tokens_per_s,
        "sequences_per_s": plan.sequences_per_s,
        "samples_per_s": plan.samples / plan.step_s,
        "frozen_bytes": frozen_bytes(plan),
        "terms": [_term_figures(term) for term in plan.terms],
    }


def ledger_figures(ledger: Ledger, total_bytes: int) -> dict[str, int]:
    """Return bytes by category; categories without a key count as workspace."""
    figures = dict.fromkeys((f"{key}_bytes" for key in _KEYS.values()), 0)
    for category, size in ledger.bytes_by_category.items():
        figures[f"{_KEYS.get(category, 'workspace')}_bytes"] += size
    return figures | {"total_bytes": total_bytes}


def _term_figures(term: Any) -> dict[str, Any]:
    numbers = {name: value if isinstance(value, str) else float(value) for name, value in term.numbers.items()}
    return {
        "category": str(term.category),
        "name": term.name,
        "size_bytes": round(float(term.size_bytes)),
        "formula": term.formula,
        "numbers": numbers,
        "source": term.source,
    }
