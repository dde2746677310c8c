"""The report of a training plan as text (the plan, its ledger, its step, alternatives, reasons, what to do) and as JSON values.

One function per section turns findings into lines; it only formats. Styles are plain terminal codes: importing rich
would take longer than making a plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from tonnage import __version__
from tonnage.budget.time.roofline import peak_rate
from tonnage.budget.training.objectives import NEXT_TOKEN
from tonnage.clock.ranges import comparison_error
from tonnage.ledger import Category
from tonnage.report.lines import bar, beside, column, cut, packed, picked, report_width, table_unit, wrapped
from tonnage.report.plans.notes import (
    frozen_bytes,
    length_lines,
    loading_figures,
    loading_words,
    objective_figures,
    objective_notes,
    part_words,
    shortage_figures,
    shortage_words,
)
from tonnage.report.step_time import NONE, Campaign, campaign_figures, campaign_words
from tonnage.units import GIB, format_bytes, percent

if TYPE_CHECKING:
    from tonnage.ledger import Ledger
    from tonnage.models.shape import ModelShape
    from tonnage.planner.training.offers import Offer
    from tonnage.planner.training.reasons import Reason
    from tonnage.planner.training.remedies import NextPlan, Remedy
    from tonnage.planner.training.search import BatchingChoice, PlanSearch, TrainingPlan

_REASONS = 8
_TERMS = 3
_NAME = 20
_WORTH_A_NOTE = 0.005  # of the speed
_CODES = {"bold": "1", "good": "1;32", "bad": "1;31", "bar": "36", "dim": "2", "": ""}

_PLAN = (
    "tight total_bytes total_range_bytes:range_bytes peak_allocated_bytes peak_reserved_bytes stages peak_moment:moment "
    "host_bytes pinned_bytes drive_bytes step_time_s:step_s step_parts_s:parts_s hidden_s tokens_per_s sequences_per_s"
)
_KEYS = "parameters gradients optimizer activations workspace context fragmentation".split()

# A line: pieces of text, each with the name of its style.
Line = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TrainingAnswer:
    """What a report says: the findings, why others lost, offers; the whole training, ways to batch; what would fit, and
    the best plan with the first of these changes.
    """

    findings: PlanSearch
    reasons: list[Reason]
    remedies: list[Remedy]
    offers: list[Offer]
    seconds: float = 0.0
    campaign: Campaign = NONE
    batchings: Sequence[BatchingChoice] = ()
    next_plan: NextPlan | None = None


def print_plan(answer: TrainingAnswer, *, stream: TextIO, explain: bool) -> None:
    """Print all sections, with a blank line between them."""
    findings = answer.findings
    sections = [
        headline(findings, answer.campaign),
        does_not_fit(findings),
        ledger(findings.closest),
        step(findings.closest) if findings.fits else iter(()),
        ([(text, style)] for text, style in length_lines(findings, list(answer.batchings))),
        next_best(findings),
        one_more_flag(findings, answer.offers),
        why_not(answer.reasons, all_of_them=explain),
        would_fit(answer.remedies),
        next_that_fits(findings.shape, answer.next_plan),
        arithmetic(findings.closest) if explain else iter(()),
        clock(findings) if explain else iter(()),
        footer(findings, answer.seconds, explain),
    ]
    has_colours = stream.isatty() and not os.environ.get("NO_COLOR")
    stream.write("\n")
    for section in sections:
        lines = list(section)
        for line in lines:
            words = "".join(f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style else text for text, style in line)
            stream.write(f"{words if has_colours else ''.join(text for text, _ in line).rstrip()}\n")
        stream.write("\n" if lines else "")


def headline(findings: PlanSearch, campaign: Campaign = NONE) -> Iterator[Line]:
    """Yield the model, the GPUs and the verdict; speed and size; the whole training; the flags."""
    shape, plan = findings.shape, findings.closest
    verdict = ("fits", "good") if findings.fits else ("does not fit", "bad")
    room = report_width() - 4 - len(verdict[0])
    *lines, last = wrapped(f"{shape.name}, {shape.parameters / 1e9:,.2f} B · {findings.cluster.words}", width=room)
    yield from _lines(lines, "bold")
    yield [(last, "bold"), (" " * (room + 2 - len(last)), ""), verdict]
    for words in shortage_words(plan.shortages, plan.loading):
        yield from _lines(wrapped(words, rest="    "), "bad")
    if findings.fits:
        yield from _lines(packed([*speed_words(plan, shape), used_words(plan)]))
        yield from _lines(packed(campaign_words(plan, campaign, gpus=findings.cluster.gpus)))
    else:
        is_said = any(demand.part == "GPU" for demand in plan.shortages)
        yield from _lines(packed([] if is_said else [used_words(plan)]))
    yield from _lines(packed(flags(plan), gap="  "))
    for text in notes(findings):
        yield from _lines(wrapped(text, rest="    "), "dim")


def speed_words(plan: TrainingPlan, shape: ModelShape) -> tuple[str, str]:
    """Return tokens or images per second, and the time of a step."""
    rate, size, unit = pace(plan, shape)
    return f"{rate:,.0f} {unit}/s", f"{time_words(plan.step_s)} a step of {size:,} {unit}"


def used_words(plan: TrainingPlan) -> str:
    """Return what the plan uses of a GPU."""
    return f"{plan.total_bytes / GIB:,.1f} of {plan.capacity_bytes / GIB:,.1f} GiB a GPU"


def pace(plan: TrainingPlan, shape: ModelShape) -> tuple[float, int, str]:
    """Return how many tokens or images are trained on per second and per step, and which."""
    batch = int(plan.configuration.global_batch)
    if shape.fixed_tokens:
        return plan.sequences_per_s, batch, "images"
    return plan.tokens_per_s, plan.tokens, "tokens"


def _lines(texts: Iterable[str], style: str = "") -> Iterator[Line]:
    return ([(text, style)] for text in texts)


def flags(plan: TrainingPlan) -> list[str]:
    """Return a plan's choices as flags without their dashes, omitting degrees of one."""
    chosen = plan.configuration
    batch = f"micro-batch {chosen.samples}" + (f" × {chosen.accumulate}" if chosen.accumulate > 1 else "")
    loss = [f"loss {chosen.loss}"] if chosen.objective.has_logits else []
    words = [chosen.framework, *_spread(plan), batch, f"checkpoint {chosen.checkpoint}", *loss]
    words += [name.replace("_", "-") for name in ("bf16_gradients", "bf16_moments") if getattr(chosen, name)]
    return [*words, *_offload(plan), *(["compile"] if chosen.compile else [])]


def exact_flags(plan: TrainingPlan, flag: str = "") -> list[str]:
    """Return the flags that ask for exactly this plan, after a flag that changes what is asked."""
    chosen, objective = plan.configuration, plan.configuration.objective
    accumulate = int(chosen.accumulate * objective.in_pass // objective.sequences)
    batch = int(chosen.samples) * accumulate * int(chosen.data)
    values: dict[str, object] = {"--framework": chosen.framework, "--zero": chosen.zero}
    if chosen.gpus > 1:
        values |= {f"--{name}": getattr(chosen, name) for name in ("tp", "pp", "cp") if objective.plain}
        values |= {"--ep": chosen.ep} if chosen.ep > 1 else {}
        values |= {"--shard": chosen.shard} if chosen.zero and chosen.shard < chosen.data else {}
    values["--micro-batch"] = int(chosen.samples)
    if not (objective.sees_whole_batch or chosen.step_in_backward):
        values["--global-batch"] = batch
    values["--checkpoint"] = chosen.checkpoint
    values |= {"--loss": chosen.loss} if objective.has_logits else {}
    values["--offload"] = plan.offload.words
    named = [f"{name} {value}" for name, value in values.items()]
    return [flag] * bool(flag and flag.partition(" ")[0] not in values) + named


def brief(plan: TrainingPlan, beside: TrainingPlan | None = None) -> str:
    """Return the same for a table row: only non-default choices, and the framework if it differs from `beside`."""
    chosen = plan.configuration
    words: list[str] = [chosen.framework] if beside and beside.configuration.framework != chosen.framework else []
    words += [*_spread(plan), f"{chosen.samples}×{chosen.accumulate}"]
    words += [f"checkpoint {chosen.checkpoint}"] if chosen.checkpoint != "none" else []
    words += [f"{chosen.loss} loss"] if chosen.loss != "full" else []
    return " ".join([*words, *_offload(plan)])


def _spread(plan: TrainingPlan) -> list[str]:
    chosen = plan.configuration
    words = [f"zero {chosen.zero}"] if chosen.gpus > 1 or chosen.zero else []
    words += [f"{name} {getattr(chosen, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(chosen, name) > 1]
    return words + ([f"pp-chunks {chosen.pp_chunks}"] if chosen.pp_chunks > 1 else [])


def _offload(plan: TrainingPlan) -> list[str]:
    return [] if plan.offload.words == "none" else [f"offload {plan.offload.words}"]


def notes(findings: PlanSearch) -> Iterator[str]:
    """Yield notes on the figures above."""
    plan, shape = findings.closest, findings.shape
    chosen = plan.configuration
    optimizer = f"{'paged ' * chosen.paged}{chosen.optimizer} ({chosen.optimizer_kernel})"
    beside = {"liger": "Liger's kernels", "dropout": "dropout", "lora_dropout": "dropout in adapters"}
    named = [words for name, words in (beside | {"tiled_mlp": "tiled MLPs"}).items() if getattr(chosen, name)]
    yield ", ".join([chosen.precision, optimizer, f"attention {chosen.attention}", *named])
    yield from part_words(shape, chosen)
    if not chosen.objective.plain:
        yield from objective_notes(findings)
    if plan.tight:
        most, there = (size / GIB for size in (plan.range_bytes[1], plan.capacity_bytes))
        yield f"tight: one in twenty such runs would need {most:,.1f} GiB or more, and there are {there:,.1f}"
    if chosen.step_in_backward:
        yield "each parameter is updated as its gradient comes: no clipping by a norm, no accumulation"
    if chosen.paged:
        yield "paged states are counted to the host: they are on the card as far as it has room, and cross in each step where not"
    gain = findings.gain_of_fastest
    if findings.fastest is not None and gain >= _WORTH_A_NOTE:
        error = f"less than the clock's error of {percent(comparison_error(), 0)}: the simpler plan is shown"
        yield f"{brief(findings.fastest, plan)} would be {percent(gain)} faster, {error}"
    if 1 < chosen.shard < chosen.data:
        yield f"hybrid: shards within groups of {chosen.shard}, copies between {chosen.data // chosen.shard} of them"
    if plan.host_bytes:
        ranks, pinned = findings.cluster.gpus_per_host, f"{plan.pinned_bytes / GIB:,.1f} of it pinned"
        used, there = (ranks * size / GIB for size in (plan.host_bytes, plan.host_capacity_bytes))
        yield f"host memory {plan.host_bytes / GIB:,.1f} GiB for each rank, {pinned}: {used:,.1f} of {there:,.0f} in a host"
    if plan.drive_bytes:
        ranks, there = findings.cluster.gpus_per_host, findings.cluster.nvme_bytes
        of = f"of {there / GIB:,.0f} in a host" if there else "in a host, whose drives' size is not known"
        held = ranks * plan.drive_bytes / GIB
        yield f"drives {plan.drive_bytes / GIB:,.1f} GiB for each rank: {held:,.1f} {of}"
    yield loading_words(plan.loading, findings.cluster)
    if chosen.precision == "fp16-mixed" and not findings.cluster.gpu.has_bf16:
        yield f"{findings.cluster.gpu.name} has no BF16: it trains in FP16, whose gradients need their loss scaled"
    if shape.max_positions and chosen.seq > shape.max_positions:
        yield f"--seq {chosen.seq} is beyond the {shape.max_positions} positions that the model was made for"
    yield from shape.notes


def does_not_fit(findings: PlanSearch) -> Iterator[Line]:
    """Yield how far the closest configuration is from fitting on a GPU, and its largest terms."""
    plan = findings.closest
    if findings.fits:
        return
    searched, over = f"the closest of {findings.searched:,} configurations", plan.total_bytes - plan.capacity_bytes
    if over <= 0:
        yield from _lines(wrapped(f"it is {searched}; a GPU has room for it"), "bad")
        return
    yield from _lines(wrapped(f"{searched} is {format_bytes(over)} over; its largest terms:"), "bad")
    for term in sorted(plan.terms, key=lambda term: -float(term.size_bytes))[:_TERMS]:
        yield [(f"  {column(round(float(term.size_bytes)), 'GiB')}  {term.name}", "")]


def ledger(plan: TrainingPlan) -> Iterator[Line]:
    """Yield bytes by category at the peak, and what is left."""
    unit = table_unit(plan.capacity_bytes)
    whole = max(plan.capacity_bytes, plan.total_bytes)
    for category, size in plan.ledger.ranked():
        yield _ledger_row(category.label, column(size, unit), size / whole)
    free = plan.capacity_bytes - plan.total_bytes
    if free > 0:
        yield [(f"  {'free':<17}{column(free, unit)}  {percent(free / whole):>6}", "dim")]
    moment, _, stage = plan.moment.partition(", ")
    of_stage = f" of the {stage}" if stage and stage != "stage" else ""
    yield [(f"  peak in the {moment}{of_stage}", "dim")]


def _ledger_row(name: str, amount: str, share: float) -> Line:
    return [(f"  {name:<17}{amount}  {percent(share):>6}  ", ""), (bar(share, 28), "bar")]


def step(plan: TrainingPlan) -> Iterator[Line]:
    """Yield the parts of a step's time, omitting empty ones."""
    total = plan.step_s
    yield [("  where a step goes", "bold")]
    for name, seconds in sorted(plan.parts_s.items(), key=lambda item: -item[1]):
        if seconds / total >= 0.0005:
            yield _ledger_row(name, f"{time_words(seconds):>11}", seconds / total)
    if plan.hidden_s > 0.0005 * total:
        yield [(f"  and {time_words(plan.hidden_s)} of transfers run behind the arithmetic", "dim")]


def next_best(findings: PlanSearch) -> Iterator[Line]:
    """Yield other kinds of plans that fit."""
    best = findings.best
    if best is None or not findings.alternatives:
        return
    others = [(brief(plan, best), plan, plan.tokens_per_s / best.tokens_per_s - 1) for plan in findings.alternatives]
    yield from _table("next best", findings.shape, others)


def one_more_flag(findings: PlanSearch, offers: list[Offer]) -> Iterator[Line]:
    """Yield the best plans of other frameworks, and other changes that gain."""
    if not offers:
        return
    rows = [(f"{offer.flag}: {brief(offer.plan)}", offer.plan, offer.gain) for offer in offers]
    yield from _table("with one more flag", findings.shape, rows)
    for offer in offers:
        if offer.numbers:
            words = f"{offer.flag} trains in other numbers: {offer.change}"
            yield from _lines(wrapped(words, first="   ", rest="     "), "dim")


def _table(title: str, shape: ModelShape, rows: list[tuple[str, TrainingPlan, float]]) -> Iterator[Line]:
    """Yield plans by description, with speed, gain and size."""
    width = min(report_width() - 3 - 25, max(52, *(len(words) + 1 for words, *_ in rows)))
    yield [(f"  {title:<{width + 2}}{f'{pace(rows[0][1], shape)[2]}/s':>9}{'GiB':>15}", "bold")]
    for words, plan, gain in rows:
        figures = f"{pace(plan, shape)[0]:>10,.0f} {100 * gain:+4.0f} %{plan.total_bytes / GIB:>8,.1f}"
        yield from _lines(beside(words, width, figures, first="   ", rest="     "))


def why_not(reasons: list[Reason], *, all_of_them: bool) -> Iterator[Line]:
    """Yield values of single choices that lost."""
    if not reasons:
        return
    yield [("  why not", "bold")]
    # Those that do not fit, then the slowest, at most two per choice, in their original order.
    kept: list[Reason] = []
    for reason in sorted(reasons, key=lambda reason: -(reason.slower if reason.slower is not None else 2.0)):
        if len(kept) < _REASONS and sum(other.choice == reason.choice for other in kept) < 2:
            kept.append(reason)
    shown = [reason for reason in reasons if all_of_them or reason in kept]
    for reason in shown:
        name = f"{reason.choice} {reason.value}"
        if len(name) > _NAME:
            yield [(f"   {name}", "")]
            name = ""
        yield from _lines(wrapped(reason.words, first=f"   {name:<{_NAME}}  "))
    if len(shown) < len(reasons):
        yield [(f"   and {len(reasons) - len(shown)} more: --explain", "dim")]


def would_fit(remedies: list[Remedy]) -> Iterator[Line]:
    """Yield changes that make it fit."""
    if not remedies:
        return
    yield [("  what would fit", "bold")]
    for remedy in remedies:
        sizes = f"{remedy.total_bytes / GIB:,.1f} of {remedy.capacity_bytes / GIB:,.1f} GiB"
        row = f"   {remedy.change:<24}{sizes:>21}"
        if len(row) + 3 + len(remedy.flag) <= report_width():
            yield [(f"{row}   {remedy.flag}", "")]
            continue
        yield [(row, "")]
        yield from _lines(wrapped(remedy.flag, first="     "))


def next_that_fits(shape: ModelShape, following: NextPlan | None) -> Iterator[Line]:
    """Yield the flags that ask for the best plan with the first change that helps, and its speed and size."""
    if following is None:
        return
    yield [("  the next plan that fits", "bold")]
    yield from _lines(packed(exact_flags(following.plan, following.flag), gap=" ", first="   "))
    yield from _lines(packed([*speed_words(following.plan, shape), used_words(following.plan)], first="   "))


def arithmetic(plan: TrainingPlan) -> Iterator[Line]:
    """Yield every term: its bytes, source, formula and inputs."""
    yield [("  term by term, at the peak", "bold")]
    width, order = min(report_width() - 34, 60), list(Category)
    for term in sorted(plan.terms, key=lambda term: order.index(term.category)):
        first, name = f"  {column(round(float(term.size_bytes)), 'GiB')}  ", f"{term.category.label}: {term.name}"
        yield from _lines(beside(name, width, f"  {cut(term.source, 17)}", first=first, rest=f"{'':15}"))
        yield from _lines(wrapped(term.formula, first=f"{'':15}= "), "dim")
        words = ", ".join(f"{name} {number_words(value)}" for name, value in dict(term.numbers).items())
        yield from _lines(wrapped(words, first=f"{'':17}"), "dim")


def number_words(value: object) -> str:
    """Format a formula's input."""
    if isinstance(value, bool | str):
        return str(value)
    number = float(value)  # type: ignore[arg-type]
    return f"{number:,.0f}" if number == int(number) else f"{number:,.4g}"


def clock(findings: PlanSearch) -> Iterator[Line]:
    """Yield what the times are based on: kernels and host, the power limit, and attained shares of link bandwidth."""
    shares, cluster, plan = findings.clock.shares, findings.cluster, findings.closest
    time, rate = findings.clock.step(plan.configuration), peak_rate(cluster.gpu, plan.configuration.precision)
    arithmetic_s, other_s, _, host_s = map(float, time.busy.values())
    rows = {}
    if arithmetic_s:
        reached = percent(float(time.busy.at_peak_s / time.busy.arithmetic_s), 0)
        rows["products"] = f"{time_words(arithmetic_s)} of a step, at {reached} of {rate / 1e12:,.4g} Tflop/s"
    rows["other kernels" if arithmetic_s else "kernels"] = f"{time_words(other_s)} of a step"
    rows["launching them"] = f"{time_words(host_s)} of the CPU, for all of a step's kernels"
    if float(time.slower) > 1:
        rows["the power limit"] = f"makes products {percent(float(time.slower) - 1, 0)} slower"
    peers, network, host = cluster.peer_bytes_per_s, cluster.network_bytes_per_s, cluster.host_link_bytes_per_s
    for name, is_used, share, bytes_per_s, of in (
        ("within a host", cluster.gpus > 1, shares.link_ceiling, peers, "of a GPU's link"),
        ("between hosts", cluster.hosts > 1, shares.link_ceiling, network, "for each GPU"),
        ("to the host", plan.offload.words != "none", shares.host_link_ceiling, host, "of a GPU's link"),
    ):
        if is_used:
            rows[name] = f"{percent(share, 0)} of {bytes_per_s / 1e9:,.4g} GB/s {of}"
    yield [("  seconds rest on", "bold")]
    for name, words in rows.items():
        yield from _lines(wrapped(words, first=f"   {name:<17}"))
    words = "kernel by kernel, as measured on an H200, where half of the steps come out within 6 %; scaled elsewhere"
    yield from _lines(wrapped(words, first="   "), "dim")


def footer(findings: PlanSearch, seconds: float, explain: bool) -> Iterator[Line]:
    """Yield what was searched, and what to do next."""
    looked = [f"{findings.looked_at:,} looked at", f"{findings.fitting:,} fit"]
    yield from _lines(packed([f"{findings.searched:,} configurations in {seconds:.2f} s", *looked]), "dim")
    if findings.fits:
        hints = ["to launch it: --export DIR", *([] if explain else ["the arithmetic: --explain"])]
        yield from _lines(packed(hints), "bold")


def time_words(seconds: float) -> str:
    """Format a time: "2.31 s", "41.0 ms"."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def plan_figures(answer: TrainingAnswer) -> dict[str, object]:
    """Return everything in the report. `best` is the closest plan if none fits."""
    findings, cluster, shape = answer.findings, answer.findings.cluster, answer.findings.shape
    names = "name architecture parameters active_parameters trained_parameters exact"
    counts = picked(findings, "configurations:searched looked_at fitting") | {"seconds": answer.seconds}
    whole = campaign_figures(findings.closest, answer.campaign, gpus=cluster.gpus) if findings.fits else {}
    return {
        "tonnage": __version__,
        **picked(findings, "fits capacity_bytes:cluster.gpu.memory_bytes"),
        "model": picked(shape, names),
        "cluster": picked(cluster, "gpu:gpu.key gpus gpus_per_host hosts host:host.name"),
        "shortages": shortage_figures(findings.closest.shortages),
        "loading": loading_figures(findings.closest.loading, cluster, findings.closest.shortages),
        "best": one_figures(findings.closest) | whole,
        "alternatives": [one_figures(plan) for plan in findings.alternatives],
        "offers": [
            picked(offer, "change flag gain other_numbers:numbers") | {"plan": one_figures(offer.plan)}
            for offer in answer.offers
        ],
        "fastest": one_figures(findings.fastest) if findings.fastest else None,
        "front": [one_figures(plan) for plan in findings.front],
        "rejected": [asdict(reason) for reason in answer.reasons],
        "remedies": [picked(remedy, "change flag total_bytes capacity_bytes") for remedy in answer.remedies],
        "next_plan": _next_figures(answer.next_plan),
        "searched": counts,
    }


def _next_figures(following: NextPlan | None) -> dict[str, object] | None:
    if following is None:
        return None
    return {"flags": exact_flags(following.plan, following.flag), "plan": one_figures(following.plan)}


def one_figures(plan: TrainingPlan) -> dict[str, Any]:
    """Return one plan."""
    plain, terms = replace(plan.configuration, objective=NEXT_TOKEN), []
    for term in plan.terms:
        numbers = {name: n if isinstance(n, str) else float(n) for name, n in dict[str, Any](term.numbers).items()}
        own = {"size_bytes": round(float(term.size_bytes)), "numbers": numbers}
        terms.append(picked(term, "category name size_bytes formula numbers source") | own)
    return {
        "config": asdict(plain) | objective_figures(plan) | {"offload": plan.offload.words},
        "fits": plan.fits,
        "shortages": shortage_figures(plan.shortages),
        "ledger": ledger_figures(plan.ledger, plan.total_bytes),
        **picked(plan, _PLAN),
        "samples_per_s": plan.samples / plan.step_s,
        "frozen_bytes": frozen_bytes(plan),
        "terms": terms,
    }


def ledger_figures(ledger: Ledger, total_bytes: int) -> dict[str, int]:
    """Return bytes by category; categories without a key count as workspace."""
    figures = dict.fromkeys((f"{key}_bytes" for key in _KEYS), 0)
    for category, size in ledger.bytes_by_category.items():
        key = str(category).removesuffix("_states")
        figures[f"{key if key in _KEYS else 'workspace'}_bytes"] += size
    return figures | {"total_bytes": total_bytes}
