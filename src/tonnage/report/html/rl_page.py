"""A step of reinforcement learning as one HTML page that works offline: phases as bars by category, alternatives,
terms.
"""

from tonnage.planner.rl.search import RlFindings, RlPlan
from tonnage.planner.rl.settings import trl_settings, verl_settings
from tonnage.report.html import markup
from tonnage.report.html.markup import bar, simple_page, size, text
from tonnage.report.plans.rl import engine_words
from tonnage.report.plans.training import flags, time_words


def render_rl_page(found: RlFindings) -> str:
    """Return the page; if nothing fits, what would comes first."""
    best, parts = found.best, [_header(found)]
    if found.remedies:
        remedies = [(f"<code>{text(flag)}</code>", time_words(plan.step_s)) for flag, plan in found.remedies]
        table = markup.table(("", "a step"), remedies, name="changes")
        parts.append(markup.section("What would fit", table, name="advice"))
    parts.append(_timeline(best))
    trl = trl_settings(best)
    words = trl or verl_settings(best)
    if words and found.fits:
        lines = "".join(f"<span>{text(f'{name}={value}', 400)}</span>\n" for name, value in words.items())
        parts.append(markup.section(f"In {'TRL' if trl else 'verl'}", f"<pre>{lines}</pre>", name="settings"))
    if found.alternatives:
        plans = [
            (text("  ".join(engine_words(plan)), 400), time_words(plan.step_s), size(plan.peak.total_bytes))
            for plan in (best, *found.alternatives)
        ]
        table = markup.table(("", "a step", "peak"), plans, name="plans", numbers=(1, 2), kind="plans")
        parts.append(markup.section("This way and others", table, name="others"))
    for number, phase in enumerate(best.phases):
        terms = []
        for one in sorted(phase.held, key=lambda one: -one.size_bytes):
            owner = markup.swatch(str(one.term.category)) + text(one.owner)
            terms.append((owner, text(one.term.name), size(one.size_bytes), text(one.term.formula)))
        table = markup.table(("", "", "", ""), terms, name=f"terms-{number}", numbers=(2,))
        head = f"{text(phase.name)}, {size(phase.total_bytes)}"
        parts.append(f"<details><summary>{head}</summary>{table}</details>")
    return simple_page(text(f"{found.shape.name} · {found.cluster.words}"), *parts)


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
