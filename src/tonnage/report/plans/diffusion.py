"""A diffusion plan as text and as JSON values: the bytes of its parts, its seconds, and why alternatives lost."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.text import Text

from tonnage import __version__
from tonnage.budget.diffusion import all_weights
from tonnage.hardware import Cluster
from tonnage.models.diffusion import Pipeline
from tonnage.planner.diffusion import DiffusionPlan, DiffusionRequest, DiffusionSearch
from tonnage.planner.training.search import HEADROOM
from tonnage.report.lines import (
    beside,
    column,
    heading,
    ledger_row,
    packed,
    picked,
    report_width,
    said,
    spaced,
    spread,
    table,
    table_unit,
    wrapped,
)
from tonnage.report.plans.notes import shortage_figures, shortage_words
from tonnage.report.plans.training import number_words, time_words
from tonnage.units import GIB, format_bytes, percent

_BAR = 22
_PLAIN = ("off", "bf16", "cached", "none", "1")  # values of choices that are not mentioned
_NAME = 32


def plan_lines(findings: DiffusionSearch, *, explain: bool = False) -> Iterator[Text | str]:
    """Yield the lines of the report."""
    plan = findings.plan
    # Where the bytes go.
    capacity = plan.cluster.gpu.memory_bytes
    unit, whole = table_unit(capacity), max(capacity, plan.total_bytes)
    ledger = []
    for term in sorted(plan.terms, key=lambda term: -float(term.size_bytes)):
        if size := round(float(term.size_bytes)):
            ledger.append(_row(term.name, f"{column(size, unit)}  ", size / whole))
    if (free := capacity - plan.total_bytes) > 0:
        ledger.append(Text(f"  {'free':<{_NAME}}{column(free, unit)}  {percent(free / whole):>6}", style="dim"))
    ledger.append(Text(f"  peak in the {plan.moment}", style="dim"))
    # Where the time goes, and why not another way.
    seconds = {name: part.s for name, part in plan.parts.items()} | {"copies to and from host": plan.moved_s}
    time = [heading("where the time goes")] if findings.fits else []
    for name, part_s in sorted(seconds.items(), key=lambda row: -row[1]) if findings.fits else ():
        if part_s / plan.seconds >= 0.0005:
            time.append(_row(name, f"{time_words(part_s):>11}  ", part_s / plan.seconds))
    why_not: list[Text | str] = [heading("why not")] if findings.others else []
    for other in findings.others:
        name, value = next((name, value) for name, value in other.choices.items() if plan.choices[name] != value)
        why_not += wrapped(reason(other, plan), first=f"   {f'{name} {value}':<22}")
    explained = _arithmetic(plan) if explain else ()
    yield from ("", *spaced(_headline(findings), ledger, time, why_not, _would_fit(findings), explained), "")


def _would_fit(findings: DiffusionSearch) -> Iterator[Text | str]:
    """Yield changes that make it fit, and the flags of the best plan with the first of them."""
    if not findings.remedies:
        return
    yield heading("what would fit")
    unit = "videos/s" if findings.pipeline.is_video else "images/s"
    rows = []
    for flag, plan in findings.remedies:
        used = f"{plan.total_bytes / GIB:,.1f} of {plan.cluster.gpu.memory_bytes / GIB:,.1f} GiB"
        rows.append((f" {flag}", f"{rate_words(plan.images_per_s)} {unit}", used))
    yield from table(rows, align="<>>", names=(0,))
    first = findings.remedies[0]
    yield ""
    yield heading("the next plan that fits")
    yield from packed(exact_flags(first.plan, first.flag), gap=" ", first="   ")


def exact_flags(plan: DiffusionPlan, flag: str = "") -> list[str]:
    """Return the flags that ask for exactly this plan, after a flag that changes what is asked."""
    values = {f"--{name}": value for name, value in plan.choices.items()}
    tiling = values.pop("--vae-tiling", "off") == "on"
    named = [f"{name} {value}" for name, value in values.items()] + ["--vae-tiling"] * tiling
    name = flag.partition(" ")[0]
    is_new = name.startswith("--") and name not in (*values, "--vae-tiling")
    return [flag] * is_new + named


def _row(name: str, amount: str, share: float) -> Text:
    return ledger_row(name, amount, share, width=_NAME, cells=_BAR, style="cyan")


def _headline(findings: DiffusionSearch) -> Iterator[Text | str]:
    pipeline, plan, request = findings.pipeline, findings.plan, findings.request
    trains = isinstance(request, DiffusionRequest)
    parameters = all_weights()[pipeline.denoiser].parameters
    verdict = Text("fits", style="bold green") if findings.fits else Text("does not fit", style="bold red")
    title = f"  {pipeline.name}, {parameters / 1e9:,.2f} B · {findings.cluster.words}"
    yield from spread(Text(title, style="bold"), verdict)
    for words in shortage_words(plan.shortages):
        yield from said(words, "red", rest="    ")
    speed = []
    if findings.fits:
        # "12.3 s a batch of 4 (11.0 s to 13.9 s)"
        batch = int(plan.choices.get("batch", plan.choices.get("micro-batch", "1")))
        what = "step" if trains else "video" if pipeline.is_video else "image"
        of = f" of {batch}" if batch > 1 else ""
        each = f"{what}{of}" if what == "step" else f"batch{of}" if batch > 1 else what
        seconds, low, high = map(time_words, (plan.seconds, *plan.range_s))
        rate = f"{rate_words(plan.images_per_s)} {'videos' if pipeline.is_video else 'images'}/s"
        speed = [rate, f"{seconds} {'an' if each == 'image' else 'a'} {each} ({low} to {high})"]
    used = f"{plan.total_bytes / GIB:,.1f} of {plan.cluster.gpu.memory_bytes / GIB:,.1f} GiB a GPU"
    yield from packed([*speed, used])
    yield from packed(flags(findings), gap="  ")
    if isinstance(request, DiffusionRequest):
        what = f"adapters of rank {request.lora_rank} on {request.base}" if request.lora_rank else request.precision
        most = f", micro-batch {findings.most} at most" if findings.most else ""
        yield from wrapped(f"{request.size.words}, {what}, {request.optimizer}{', EMA' * request.ema}{most}")
    else:
        passes = {"batch": ", guided in one batch", "passes": ", guided in two passes"}.get(pipeline.guidance, "")
        most = f", batch {findings.most} at most" if findings.most else ""
        yield from wrapped(f"{request.size.words}, {request.steps} steps{passes if request.guided else ''}{most}")
    there = plan.cluster.host_memory_per_gpu_bytes
    if plan.host_bytes:
        yield from wrapped(f"host memory {plan.host_bytes / GIB:,.1f} of {there / GIB:,.0f} GiB")


def rate_words(rate: float) -> str:
    """Format a rate with three digits: "12.3", "0.041"."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def flags(findings: DiffusionSearch) -> list[str]:
    """Return the choices as flags without their dashes."""
    return [f"{name} {value}" for name, value in findings.plan.choices.items()]


def reason(plan: DiffusionPlan, best: DiffusionPlan) -> str:
    """Say why another plan is not the answer."""
    capacity = plan.cluster.gpu.memory_bytes
    needs = f"{plan.total_bytes / GIB:,.1f} GiB"
    if plan.total_bytes > capacity:
        return f"needs {needs}, {format_bytes(plan.total_bytes - capacity)} too much, in the {plan.moment}"
    if any(demand.part == "host" for demand in plan.shortages):
        there = plan.cluster.host_memory_per_gpu_bytes
        return f"needs {plan.host_bytes / GIB:,.1f} GiB of its host, which has {there / GIB:,.0f}"
    if best.total_bytes <= (1 - HEADROOM) * capacity < plan.total_bytes:
        return f"needs {needs}, and leaves less than {percent(HEADROOM, 0)} of the card free"
    gain = plan.images_per_s / best.images_per_s - 1
    speed = "as fast" if abs(gain) < 0.005 else f"{percent(abs(gain), 0)} {'faster' if gain > 0 else 'slower'}"
    return f"{speed}, {needs}" + (", within the clock's error" if gain >= 0.005 else "")


def _arithmetic(plan: DiffusionPlan) -> Iterator[Text | str]:
    yield heading("term by term, at the peak")
    for term in plan.terms:
        first = f"  {column(round(float(term.size_bytes)), 'GiB')}  "
        name = f"{term.category.label}: {term.name}"
        yield from beside(name, report_width() - 34, f"  {term.source}", first=first, rest=f"{'':15}")
        numbers = ", ".join(f"{name} {number_words(value)}" for name, value in term.numbers.items())
        for words in filter(None, (term.formula and f"= {term.formula}", numbers)):
            yield from said(words, "dim", first=f"{'':15}")


def holder_lines(
    pipeline: Pipeline, found: "list[tuple[Cluster, DiffusionSearch | None]]", what: str
) -> Iterator[Text | str]:
    """Yield the lines that say which GPUs hold it."""
    rows = [("card", "memory", "used", "videos/s" if pipeline.is_video else "images/s", "how")]
    for cluster, each in found:
        if each is not None and each.fits:
            how = ", ".join(f"{name} {value}" for name, value in each.plan.choices.items() if value not in _PLAIN)
            memory, used = (f"{size / GIB:,.1f} GiB" for size in (cluster.gpu.memory_bytes, each.plan.total_bytes))
            rows.append((cluster.name, memory, used, rate_words(each.plan.images_per_s), how))
    small = [cluster.name for cluster, each in found if each is not None and not each.fits]
    others = [cluster.name for cluster, each in found if each is None]
    named = [
        f"{words}: {', '.join(names)}" for words, names in (("too small", small), ("without BF16", others)) if names
    ]
    yield ""
    yield from wrapped(f"{pipeline.name} · {what} · which cards hold it")
    yield ""
    yield from [*table(rows, align="<>>><", names=(4,)), ""] if len(rows) > 1 else ()
    yield from (line for words in named for line in wrapped(words))


def holder_figures(pipeline: Pipeline, found: "list[tuple[Cluster, DiffusionSearch | None]]") -> dict[str, Any]:
    """Return the same as JSON values."""
    cards = [
        {"gpus": cluster.name, "memory_bytes": cluster.gpu.memory_bytes, "fits": each is not None and each.fits}
        | ({"plan": one_figures(each.plan)} if each is not None else {})
        for cluster, each in found
    ]
    return {"tonnage": __version__, "model": {"name": pipeline.name}, "cards": cards}


def plan_figures(findings: DiffusionSearch) -> dict[str, Any]:
    """Return everything in the report as JSON values."""
    return {
        "tonnage": __version__,
        **picked(findings, "fits capacity_bytes:cluster.gpu.memory_bytes"),
        "model": {"name": findings.pipeline.name, "parameters": all_weights()[findings.pipeline.denoiser].parameters},
        "cluster": picked(findings.cluster, "gpu:gpu.key gpus"),
        "request": asdict(findings.request),
        "best": one_figures(findings.plan),
        "most": findings.most,
        "remedies": [
            {"flag": flag, "flags": exact_flags(plan, flag), "plan": one_figures(plan)}
            for flag, plan in findings.remedies
        ],
        "others": [one_figures(plan) | {"why_not": reason(plan, findings.plan)} for plan in findings.others],
    }


def one_figures(plan: DiffusionPlan) -> dict[str, Any]:
    """Return one plan as JSON values."""
    return {
        **picked(plan, "choices fits total_bytes peak_allocated_bytes peak_moment:moment"),
        "host_bytes": round(plan.host_bytes),
        "shortages": shortage_figures(plan.shortages),
        "seconds": plan.seconds,
        "range_s": list(plan.range_s),
        "images_per_s": plan.images_per_s,
        "parts_s": {name: part.s for name, part in plan.parts.items()} | {"copies": plan.moved_s},
        "terms": [
            picked(t, "category name size_bytes source") | {"size_bytes": round(float(t.size_bytes))}
            for t in plan.terms
        ],
    }
