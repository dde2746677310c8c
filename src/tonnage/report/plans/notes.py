"""Notes on a plan (loading, lengths of samples, an objective, parts of a model) and which GPUs hold a model: text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tonnage import __version__
from tonnage.ledger import Category
from tonnage.report.lines import beside, picked, report_width, table, wrapped
from tonnage.units import GIB, percent

if TYPE_CHECKING:
    from pathlib import Path

    from tonnage.budget.demands import Demand
    from tonnage.budget.loading import Loading, Way
    from tonnage.budget.training.configuration import Configuration
    from tonnage.hardware import Cluster
    from tonnage.models.shape import ModelShape
    from tonnage.planner.holders import Holder
    from tonnage.planner.training.lengths import Lengths
    from tonnage.planner.training.search import BatchingChoice, PlanSearch, TrainingPlan

_WAYS: dict[Way, str] = {
    "every rank": "every rank builds the whole model",
    "first rank": "a host's first rank hands the model on; transformers 5 copies it on the others",
    "own part": "each rank reads its own part",
    "split": "ranks split each tensor, and order their parts on the host",
    "mapped": "weights go from mapped files to the card, one by one",
}
_REMEDIES: dict[Way, str] = {
    "every rank": "load onto the card (device_map), start fewer ranks at once, or shard with --framework fsdp2",
    "first rank": "load a distributed checkpoint, of which each rank reads its part, or use transformers 4",
    "own part": "give the hosts more memory, or split tensors further with --tp",
    "split": "give the hosts more memory, or shard over more of them",
    "mapped": "load a checkpoint that is quantised already, or shard it over more cards",
}
_WITHOUT_COPY = {
    "adapters-off": "the reference is the model without its adapters",
    "precomputed": "the reference has read all samples before",
}
# Another way is mentioned if it gains this share.
_WORTH_A_WORD = 0.05


def loading_words(loading: Loading, cluster: Cluster) -> str:
    """Return what loading takes of a host and of a GPU, and how it is done."""
    memory = cluster.host_memory_bytes
    of = f" of a host's {memory / GIB:,.0f}" if memory else " of the memory that the host shares with it"
    host = f"{loading.host_bytes / GIB:,.1f} GiB{of}"
    if not loading.host_bytes:
        host = f"file cache for {loading.checkpoint_bytes / GIB:,.1f} GiB, which the host may drop"
    return f"loading: {host}, {loading.card_bytes / GIB:,.1f} GiB on the card; {_WAYS[loading.way]}"


def shortage_words(lacking: Iterable[Demand], loading: Loading | None = None) -> Iterator[str]:
    """Yield a sentence for each part that a plan has too little of; for loading, with what helps."""
    for demand in lacking:
        advice = f": {_REMEDIES[loading.way]}" if demand.while_loading and loading is not None else ""
        yield f"{demand.words}{advice}"


def shortage_figures(lacking: Iterable[Demand]) -> list[dict[str, Any]]:
    """Return the same as JSON values."""
    return [
        picked(demand, "part words")
        | {"needed_bytes": round(float(demand.needed_bytes)), "available_bytes": demand.available_bytes}
        for demand in lacking
    ]


def refusal_lines(folder: Path, lacking: Iterable[Demand]) -> list[str]:
    """Return why `--export` writes nothing for a plan that does not fit."""
    reasons = "; ".join(demand.words for demand in lacking)
    return [*wrapped(f"nothing is written to {folder}, because the plan does not fit: {reasons}", rest="    "), ""]


def loading_figures(loading: Loading, cluster: Cluster, lacking: Iterable[Demand]) -> dict[str, Any]:
    """Return JSON values, by rank of one host; `lacking` is what the plan has too little of."""
    return {
        "way": loading.way,
        "fits": not any(demand.while_loading for demand in lacking),
        "host_bytes": loading.host_bytes,
        "host_bytes_by_rank": list(loading.host_bytes_by_rank),
        "host_capacity_bytes": cluster.host_memory_bytes,
        **picked(loading, "checkpoint_bytes card_bytes"),
    }


def length_words(findings: PlanSearch) -> Iterator[str]:
    """Yield the lengths, the worst micro-batch and its frequency, and the padding."""
    lengths, size = findings.request.lengths, int(findings.closest.configuration.micro_batch)
    if lengths is None:
        return
    cut = f"; {percent(lengths.cut)} are longer and cut" if lengths.cut else ""
    yield f"samples have {lengths.mean:,.0f} tokens in the mean and {lengths.longest:,} at most{cut}"
    tokens, often = int(lengths.worst(size)) * size, lengths.at_worst(size)
    how = "the expected largest of an epoch" if lengths.batching == "padding-free" else "the largest of an epoch"
    rare = f"1 in {max(1 / max(often, 1e-9), 1):,.0f} comes within a tenth of it"
    yield f"memory is that of {how}, {tokens:,} tokens in a micro-batch; {rare if often <= 0.995 else 'all are as large'}"
    yield f"{percent(lengths.padding(size))} of what is computed is padding"
    if lengths.batching in ("pad", "bucket") and lengths.longest > lengths.values[0]:
        yield "shapes that change leave the allocator's memory in pieces: set PYTORCH_ALLOC_CONF=expandable_segments:True"


def length_lines(findings: PlanSearch, choices: list[BatchingChoice]) -> Iterator[tuple[str, str]]:
    """Yield the same as a section, with a table of all ways; each line with its style."""
    lengths = findings.request.lengths
    if lengths is None:
        return
    yield "  lengths", "bold"
    for words in length_words(findings):
        yield from ((line, "") for line in wrapped(words, first="   ", rest="     "))
    yield f"   {'--batching':<14}{'micro-batch':>12}{'samples/s':>12}{'padding':>10}{'GiB':>9}", "bold"
    for batching, plan in choices:
        if plan is None:
            yield f"   {batching:<14}{'does not fit':>12}", ""
            continue
        size = int(plan.configuration.micro_batch)
        padding = percent(_of(lengths, batching).padding(size), 0)
        row = f"{size:>12,}{plan.sequences_per_s:>12,.4g}{padding:>10}{plan.total_bytes / GIB:>9,.1f}"
        yield from ((line, "") for line in beside(batching, min(report_width() - 46, 14), row, first="   "))
    # The fastest way, if it is another.
    fastest, best = max(((plan.sequences_per_s, way) for way, plan in choices if plan is not None), default=(0.0, ""))
    gain = fastest / findings.best.sequences_per_s if findings.best is not None else 0.0
    words = f"--batching {best} would train {gain:.1f} × as many samples a second"
    if findings.best is None:
        words = f"--batching {best} fits, at {fastest:,.4g} samples a second"
    elif gain < 1 + _WORTH_A_WORD:
        words = "no other way trains more samples a second"
    yield from ((line, "") for line in wrapped(words if best else "", first="   ", rest="     "))


def _of(lengths: Lengths, batching: Any) -> Lengths:
    return replace(lengths, batching=batching)


def length_figures(findings: PlanSearch, choices: list[BatchingChoice]) -> dict[str, Any]:
    """Return the same as JSON values; empty if all samples have one length."""
    lengths, size = findings.request.lengths, int(findings.closest.configuration.micro_batch)
    if lengths is None:
        return {}
    figures = {
        **picked(lengths, "mean_tokens:mean longest_tokens:longest batching share_cut:cut"),
        "share_padding": lengths.padding(size),
        "worst_tokens": int(lengths.worst(size)) * size,
        "share_near_worst": lengths.at_worst(size),
        "batchings": [
            {
                "batching": batching,
                "fits": plan is not None,
                "micro_batch": int(plan.configuration.micro_batch) if plan else None,
                "samples_per_s": plan.sequences_per_s if plan else None,
                "share_padding": _of(lengths, batching).padding(int(plan.configuration.micro_batch)) if plan else None,
                "total_bytes": plan.total_bytes if plan else None,
            }
            for batching, plan in choices
        ],
    }
    return {"lengths": figures}


def objective_notes(findings: PlanSearch) -> Iterator[str]:
    """Yield samples per step and second, what is frozen, and for in-batch negatives how many pairs fit."""
    plan = findings.closest
    objective = plan.configuration.objective
    words = [f"{objective.name}: {plan.samples:,} {objective.sample} a step"]
    if findings.fits:
        pace = plan.samples / plan.step_s
        words.append(f"{pace:,.0f} {objective.sample}/s" if pace >= 100 else f"{pace:.3g} {objective.sample}/s")
    if objective.holds_frozen:
        named = f" {objective.teacher.name}" if objective.teacher else ""
        on_gpu = plan.configuration.parameter_place == "gpu"
        size = f" {frozen_bytes(plan) / GIB:,.1f} GiB a GPU" if on_gpu else ", which is not on the GPU"
        words.append(f"+ {objective.frozen_name}{named}{size}")
    elif objective.how:
        words.append(_WITHOUT_COPY[objective.how])
    yield ", ".join(words)
    if objective.grad_cache:
        yield "texts of a pair go through one by one, first without gradients: a micro-batch is as many of one side"
    free = findings.request.micro_batch is None and findings.request.global_batch is None
    if findings.fits and objective.sees_whole_batch and free:
        from tonnage.planner.holders import largest_micro_batch

        most = largest_micro_batch(findings)
        yield f"at most {most:,} {objective.sample} fit in a pass of one GPU; --grad-cache takes a larger batch in parts"


def frozen_bytes(plan: TrainingPlan) -> int:
    """Return the weights of a reference or teacher on one GPU."""
    objective = plan.configuration.objective
    if not objective.holds_frozen:
        return 0
    kept = (term for term in plan.terms if term.category is Category.PARAMETERS)
    return round(sum(float(term.size_bytes) for term in kept if term.name.startswith(objective.frozen_name)))


def objective_figures(plan: TrainingPlan) -> dict[str, Any]:
    """Return JSON values for a plan's choices; batches count samples, as the flags do."""
    objective = plan.configuration.objective
    return {
        "objective": objective.name,
        "reference": objective.how,
        "teacher": objective.teacher.name if objective.teacher else None,
        "micro_batch": int(plan.configuration.samples),
        "accumulate": int(plan.configuration.accumulate * objective.in_pass // objective.sequences),
        "sequences_per_sample": objective.sequences,
    }


def part_words(shape: ModelShape, configuration: Configuration) -> Iterator[str]:
    """Yield notes below the headline; none for a text model that is trained whole."""
    tower = next((stack for stack in shape.stacks[:-1] if stack.picture), None)
    if tower is not None and shape.projector is not None and shape.projector.tokens:
        seen = f"{tower.sequences} × {tower.tokens:,}" if tower.sequences > 1 else f"{tower.tokens:,}"
        inside = f"{shape.projector.tokens:,} of the {configuration.seq:,} of a sequence"
        yield f"images of a sample: {seen} tokens in their tower, {inside}"
    if shape.unfrozen is not None:
        trained = shape.trained_parameters
        frozen = f"{_count(shape.parameters - trained)} parameters are frozen"
        if configuration.lora_rank:
            yield f"{frozen} with no adapters beside them"
            return
        held = "16 bits" if configuration.compute_bytes == 2 else "FP32"
        yield f"{_count(trained)} parameters are trained; {frozen}, in {held}, without gradients and states"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M"


def holder_lines(shape: ModelShape, holders: list[Holder], *, what: str, most: str) -> Iterator[str]:
    """Yield the table. `what` is planned, like "training at 4,096 tokens"; `most` is the heading of the last column."""
    from tonnage.planner.holders import smallest

    yield ""
    yield from wrapped(f"{shape.name}, {shape.parameters / 1e9:,.2f} B · {what} · which cards hold it")
    yield ""
    least, holding = smallest(holders), [holder for holder in holders if holder.most]
    offload = "offload" * any(holder.offload for holder in holding)
    rows: list[tuple[str, ...]] = [("", "cards", "memory", "used a GPU", most, "tokens/s", offload)]
    for one in holding:
        sizes = (f"{size / GIB:,.1f} GiB" for size in (one.memory_bytes, one.needed_bytes))
        where = ("NVMe" if "nvme" in one.offload else "host") if one.offload else ""
        counts = (f"{one.most:,}", f"{one.tokens_per_s:,.0f}")
        rows.append(("→" * (one is least), one.cluster.name, *sizes, *counts, where))
    yield from [*table(rows, align="<<>>>><", names=(6,)), ""] if holding else ()
    if least:
        yield from wrapped(f"→ the least memory that holds it; in full: --gpus {least.cluster.name}")
    too_small = [holder.cluster.name for holder in holders if not holder.most]
    if too_small:
        yield from wrapped(f"too small: {', '.join(too_small)}")


def holder_figures(shape: ModelShape, holders: list[Holder], *, most: str) -> dict[str, Any]:
    """Return the same as JSON values."""
    from tonnage.planner.holders import smallest

    least = smallest(holders)
    return {
        "version": __version__,
        "model": picked(shape, "name parameters exact"),
        "smallest": least.cluster.name if least else None,
        "cards": [
            picked(holder, "gpus:cluster.name memory_bytes")
            | {"fits": bool(holder.most)}
            | picked(holder, f"used_bytes:needed_bytes {most.replace('-', '_')}:most tokens_per_s offload")
            for holder in holders
        ],
    }
