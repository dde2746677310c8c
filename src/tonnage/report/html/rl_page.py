"""A step of reinforcement learning as one HTML page that works offline: phases as bars by category, alternatives,
terms.
"""

from tonnage.planner.rl import RlFindings, RlPlan
from tonnage.planner.rl_settings import trl_settings, verl_settings
from tonnage.report.html import markup
from tonnage.report.html.markup import size, text
from tonnage.report.html.sections import bar
from tonnage.report.html.shell import simple_page
from tonnage.report.plan import flags, time_words
from tonnage.report.rl import engine_words


def render_rl_page(found: RlFindings) -> str:
    """Return the page; if nothing fits, what would comes first."""
    return simple_page(
        text(f"{found.shape.name} · {found.cluster.words}"),
        _header(found),
        _remedies(found),
        _timeline(found.best),
        _settings(found),
        _others(found),
        *(_phase(found.best, number) for number in range(len(found.best.phases))),
    )


def _header(found: RlFindings) -> str:
    plan, asked = found.best, found.request
    work = f"{asked.algorithm}, {asked.prompts:,} × {asked.group:,} completions of {asked.completion:,} tokens"
    facts = [work, *flags(plan.trainer), *engine_words(plan)]
    tiles = [
        ("a step", time_words(plan.step_s), f"{plan.samples_per_s:,.1f} samples/s" if plan.step_s else ""),
        ("tokens a second", f"{plan.tokens_per_s:,.0f}" if plan.step_s else "", "generated and trained on"),
        ("the fullest phase", size(plan.peak.total_bytes), text(plan.peak.name)),
        ("the engine's share", f"{plan.utilization:g}", "gpu_memory_utilization"),
    ]
    verdict, kind = ("fits", "ok") if found.fits else ("does not fit", "oom")
    return markup.head(text(found.shape.name), verdict, kind, text(" · ".join(facts), 1000), markup.tiles(tiles))


def _remedies(found: RlFindings) -> str:
    rows = [(f"<code>{text(flag)}</code>", time_words(plan.step_s)) for flag, plan in found.remedies]
    return (
        markup.section("What would fit", markup.table(("", "a step"), rows, name="changes"), name="advice")
        if rows
        else ""
    )


def _timeline(plan: RlPlan) -> str:
    whole = max(plan.cluster.gpu.memory_bytes, plan.peak.total_bytes)
    rows: list[tuple[str, ...]] = []
    used: dict[str, str] = {}
    for phase in plan.phases:
        parts = [(str(category), part) for category, part in phase.ledger.ranked()]
        used |= {str(category): category.label for category, _ in phase.ledger.ranked()}
        rows.append((text(phase.name), time_words(phase.seconds), size(phase.total_bytes), bar(parts, whole)))
    legend = " ".join(f"{markup.swatch(kind)}{text(name)}" for kind, name in used.items())
    table = markup.table(("", "", "", ""), rows, name="phases", numbers=(1, 2), kind="bars")
    note = f"of {size(plan.cluster.gpu.memory_bytes)} on each GPU"
    return markup.section("The phases of a step", table, f"<p>{legend}</p>", name="timeline", note=note)


def _settings(found: RlFindings) -> str:
    words = trl_settings(found.best) or verl_settings(found.best)
    if not words or not found.fits:
        return ""
    lines = "".join(f"<span>{text(f'{name}={value}', 400)}</span>\n" for name, value in words.items())
    where = "TRL" if trl_settings(found.best) else "verl"
    return markup.section(f"In {where}", f"<pre>{lines}</pre>", name="settings")


def _others(found: RlFindings) -> str:
    if not found.alternatives:
        return ""
    rows = [
        (text("  ".join(engine_words(plan)), 400), time_words(plan.step_s), size(plan.peak.total_bytes))
        for plan in (found.best, *found.alternatives)
    ]
    table = markup.table(("", "a step", "peak"), rows, name="plans", numbers=(1, 2), kind="plans")
    return markup.section("This way and others", table, name="others")


def _phase(plan: RlPlan, number: int) -> str:
    phase = plan.phases[number]
    rows = [
        (
            markup.swatch(str(one.term.category)) + text(one.owner),
            text(one.term.name),
            size(one.size_bytes),
            text(one.term.formula),
        )
        for one in sorted(phase.held, key=lambda one: -one.size_bytes)
    ]
    table = markup.table(("", "", "", ""), rows, name=f"terms-{number}", numbers=(2,))
    return f"<details><summary>{text(phase.name)}, {size(phase.total_bytes)}</summary>{table}</details>"
