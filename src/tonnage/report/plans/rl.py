"""A step of reinforcement learning as text and as JSON values: its phases, the fullest one, alternatives, changes."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from tonnage import __version__
from tonnage.budget.rl import Held, Phase
from tonnage.ledger import Category
from tonnage.planner.rl.search import OFFLOAD_NAMES, RlFindings, RlPlan
from tonnage.planner.rl.settings import trl_settings, verl_settings
from tonnage.report.lines import (
    bar,
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
from tonnage.report.plans.training import flags, time_words
from tonnage.units import GIB, format_bytes, percent


def rl_lines(found: RlFindings, *, explain: bool = False) -> Iterator[Text | str]:
    """Yield the lines of the report."""
    phase, capacity = found.best.peak, found.best.cluster.gpu.memory_bytes
    unit = table_unit(capacity)
    peak = [heading(f"at the peak, in {phase.name}")]
    for name, size in [*grouped(phase).items(), ("free", capacity - phase.total_bytes)]:
        if size > 0:
            peak.append(ledger_row(name, f"{column(size, unit)} ", size / capacity, width=26, cells=24, wide=7))
    explained = _arithmetic(found.best) if explain else []
    settings = _settings(found) if found.fits else ()
    words = wrapped("every completion is counted as long as asked; --explain shows every term of every phase")
    timeline, rest = _timeline(found.best), (_others(found), _remedies(found), settings, words)
    yield from ("", *spaced(_headline(found), timeline, peak, *explained, *rest), "")


def _headline(found: RlFindings) -> Iterator[Text | str]:
    shape, plan, asked = found.shape, found.best, found.request
    verdict = Text("fits", "green") if found.fits else Text("does not fit", "red")
    yield from spread(Text(f"  {shape.name}, {shape.parameters / 1e9:,.2f} B · {found.cluster.words}", "bold"), verdict)
    for words in shortage_words(plan.shortages, plan.trainer.loading):
        yield from said(words, "red", rest="    ")
    work = f"{asked.prompts:,} prompt{'s' * (asked.prompts != 1)} × {asked.group:,}"
    work += f" completion{'s' * (asked.group != 1)}, {asked.prompt:,} + {asked.completion:,} tokens"
    yield from wrapped(f"{asked.algorithm}, {work}")
    used = f"{plan.peak.total_bytes / GIB:,.1f} of {plan.cluster.gpu.memory_bytes / GIB:,.1f} GiB a GPU"
    speed = [f"{time_words(plan.step_s)} a step", f"{plan.samples_per_s:,.1f} samples/s"]
    yield from packed([*([*speed, f"{plan.tokens_per_s:,.0f} tokens/s"] if found.fits else []), used])
    chosen = plan.trainer.configuration
    adapters = [f"lora {chosen.lora_rank}"] if chosen.lora_rank else []
    adapters += [f"base {chosen.base}"] if chosen.lora_rank and chosen.base != "16-bit" else []
    yield from packed([*flags(plan.trainer), chosen.precision, *adapters], gap="  ")
    yield from packed(engine_words(plan), gap="  ")


def exact_flags(plan: RlPlan, flag: str) -> list[str]:
    """Return the flags that ask for exactly this plan, after a flag that changes what is asked."""
    chosen, cast = plan.trainer.configuration, plan.cast
    values: dict[str, object] = {"--framework": chosen.framework, "--zero": chosen.zero}
    values |= {"--micro-batch": int(chosen.samples), "--checkpoint": chosen.checkpoint, "--loss": chosen.loss}
    values |= {"--rollout-gpus": plan.rollout_gpus} if plan.cluster.gpus > 1 else {}
    if plan.engine.configuration.engine == "vllm":
        values["--engine-tp"] = plan.engine.configuration.tp
    values["--utilization"] = f"{plan.utilization:g}"
    values["--offload"] = ",".join(OFFLOAD_NAMES[name] for name in OFFLOAD_NAMES if name in cast.offload) or "none"
    sleep = [] if plan.rollout_gpus else [f"--sleep {cast.sleep}" if cast.sleep else "--no-sleep"]
    named = [f"{name} {value}" for name, value in values.items()]
    return [flag] * (flag.partition(" ")[0] not in values) + [*named, *sleep]


def engine_words(plan: RlPlan) -> list[str]:
    """Return the engine's settings, and what is offloaded."""
    asked, cast = plan.engine.configuration, plan.cast
    where = f"on {plan.rollout_gpus} GPUs of its own" if plan.rollout_gpus else "on the same GPUs"
    words = [f"{asked.engine} {where}", f"utilization {asked.utilization:g}"]
    words += [f"engine-tp {asked.tp}"] if asked.tp > 1 else []
    if not plan.rollout_gpus:
        words.append(f"sleep {cast.sleep}" if cast.sleep else "no-sleep")
    words += ["share-weights"] if cast.share_weights else []
    words += ["overlap"] if plan.request.overlap else []
    moved = [OFFLOAD_NAMES[name] for name in OFFLOAD_NAMES if name in cast.offload]
    words += [f"offload {','.join(moved)}"] if moved else []
    return words


def _timeline(plan: RlPlan) -> Iterator[Text | str]:
    """Yield a row for each phase: its seconds, its memory, and a bar of the card; then what bounds the rollout."""
    capacity = plan.cluster.gpu.memory_bytes
    yield heading(f"{'phase':<16}{'seconds':>9}{'':9}{'on the card':>12}")
    for phase in plan.phases:
        share = phase.total_bytes / capacity
        time = f"{phase.seconds:9,.2f} {percent(phase.seconds / max(plan.step_s, 1e-9), 0):>6}"
        mark = "  ← peak" if phase is plan.peak else ""
        size = f"{column(phase.total_bytes, 'GiB')} {percent(share, 0):>6}"
        yield f"  {phase.name:<16}{time}  {size}  {bar(share, 16)}{mark}".rstrip()
    made, words = plan.rollout, "no rollout: there is no room for the KV cache"
    if made is not None:
        waves = f" in {made.waves} waves" if made.waves > 1 else " at once"
        cache = f"{format_bytes(plan.engine.ledger[Category.KV_CACHE])} of KV cache"
        each = f"{made.batch:,}{waves}, {time_words(made.step_s)} a token"
        words = f"{made.samples:,} sequences an engine, {each}; {cache}"
    yield from wrapped(words)


def label(one: Held) -> str:
    """Return a readable name."""
    category = one.term.category
    shared = category in (Category.CONTEXT, Category.FRAGMENTATION)
    if shared or (one.owner == "actor" and category is not Category.PARAMETERS):
        return category.label
    return f"{one.owner} {'weights' if category is Category.PARAMETERS else category.label}"


def grouped(phase: Phase) -> dict[str, int]:
    """Return bytes by these labels, the largest first."""
    sums: Counter[str] = Counter()
    for one in phase.held:
        sums[label(one)] += one.size_bytes
    return dict(sums.most_common())


def _arithmetic(plan: RlPlan) -> Iterator[list[Text | str]]:
    """Yield a section for each phase: what lies there, and by which formula."""
    for phase in plan.phases:
        lines: list[Text | str] = [
            heading(f"{phase.name}, {time_words(phase.seconds)}, {format_bytes(phase.total_bytes)}")
        ]
        for one in sorted(phase.held, key=lambda one: -one.size_bytes):
            source = f"{one.term.formula} ({one.term.source})" if one.term.formula else one.term.source
            figures = f"{format_bytes(one.size_bytes):>11}  {source}"[: report_width() - 38]
            lines += beside(f"{one.owner}: {one.term.name}", 36, figures)
        yield lines


def _others(found: RlFindings) -> Iterator[Text | str]:
    if not found.alternatives:
        return
    yield heading("or instead")
    room = report_width() - 26
    yield from beside("", room, f"{'a step':>10}{'peak':>12}")
    for plan in found.alternatives:
        chosen = plan.trainer.configuration
        words = "  ".join(engine_words(plan)[0 if plan.rollout_gpus else 1 :])
        how = f"zero {chosen.zero}, {chosen.micro_batch}×{chosen.accumulate}, checkpoint {chosen.checkpoint}"
        figures = f"{time_words(plan.step_s):>10}{format_bytes(plan.peak.total_bytes):>12}"
        yield from beside(f"{words}; {how}", room, figures, rest="    ")


def _remedies(found: RlFindings) -> Iterator[Text | str]:
    if found.fits:
        return
    if missing := found.best.missing_bytes:
        yield from wrapped(f"{format_bytes(missing)} of a GPU are missing in {found.best.peak.name}")
    if found.remedies:
        yield heading("would fit")
        rows = []
        for flag, plan in found.remedies:
            rows.append((flag, f"{time_words(plan.step_s)} a step", f"{plan.peak.total_bytes / GIB:,.1f} GiB a GPU"))
        yield from table(rows, align="<>>", names=(0,))
        flag, plan = found.remedies[0]
        yield ""
        yield heading("the next plan that fits")
        yield from packed(exact_flags(plan, flag), gap=" ", first="   ")


def _settings(found: RlFindings) -> Iterator[Text | str]:
    """Yield the plan as settings of TRL or verl."""
    trl, verl = trl_settings(found.best), verl_settings(found.best)
    if not trl and not verl:
        return
    config = "RLOOConfig" if found.request.algorithm == "rloo" else "GRPOConfig"
    yield heading(f"in trl.{config}" if trl else "in verl.trainer.main_ppo")
    yield from packed([f"{name}={value}" for name, value in (trl or verl).items()], gap="  ")


def rl_figures(found: RlFindings) -> dict[str, Any]:
    """Return JSON values with stable keys. Sizes are per GPU."""
    asked, models = found.request, {"reward": found.request.reward, "critic": found.request.critic}
    names = "algorithm prompts group prompt completion iterations reference samples seq share_weights own_process"
    return {
        "tonnage": __version__,
        "fits": found.fits,
        "model": picked(found.shape, "name parameters exact"),
        **picked(found.cluster, "gpu:gpu.name gpus capacity_bytes:gpu.memory_bytes"),
        "request": picked(asked, f"{names} overlap")
        | {role: model.name if model else None for role, model in models.items()},
        "best": _plan_figures(found.best),
        "settings": {"trl": trl_settings(found.best), "verl": verl_settings(found.best)},
        "alternatives": [_plan_figures(plan) for plan in found.alternatives],
        "remedies": [
            {"flag": flag, "flags": exact_flags(plan, flag), **_plan_figures(plan)} for flag, plan in found.remedies
        ],
    }


def _plan_figures(plan: RlPlan) -> dict[str, Any]:
    chosen, asked, made = plan.trainer.configuration, plan.engine.configuration, plan.rollout
    numbers = ("micro_batch", "accumulate", "data", "shard")
    return {
        **picked(plan, "fits step_s"),
        "shortages": shortage_figures(plan.shortages),
        "samples_per_s": plan.samples_per_s if plan.step_s else 0.0,
        "tokens_per_s": plan.tokens_per_s if plan.step_s else 0.0,
        "peak": picked(plan.peak, "phase:name total_bytes"),
        **picked(plan, "missing_bytes host_bytes rollout_gpus sleep:cast.sleep"),
        "offload": [OFFLOAD_NAMES[name] for name in OFFLOAD_NAMES if name in plan.cast.offload],
        "trainer": picked(chosen, "precision optimizer checkpoint loss zero framework lora_rank base")
        | {name: int(getattr(chosen, name)) for name in numbers},
        "engine": picked(asked, "name:engine tp utilization max_seqs batched_tokens")
        | picked(plan.engine.kv, "blocks kv_tokens:tokens"),
        "rollout": made and picked(made, "copies samples batch waves prefill_s decode_s token_s:step_s"),
        "timeline": [
            picked(phase, "name on seconds total_bytes allocated_bytes")
            | {
                "ledger": {str(category): size for category, size in phase.ledger.bytes_by_category.items()},
                "held": [picked(one, "owner name:term.name category:term.category size_bytes") for one in phase.held],
            }
            for phase in plan.phases
        ],
    }
