"""A training plan as one HTML page that works offline: the plan, its ledger, its step, alternatives, reasons, every
term.
"""

from collections.abc import Sequence

from tonnage.budget.terms import Term
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape
from tonnage.planner.offers import Offer
from tonnage.planner.reasons import Reason
from tonnage.planner.remedies import Remedy
from tonnage.planner.search import PlanSearch, TrainingPlan
from tonnage.report.campaign import NONE, Campaign, campaign_words
from tonnage.report.html import markup
from tonnage.report.html.markup import share, size, text
from tonnage.report.html.sections import bar
from tonnage.report.html.shell import simple_page
from tonnage.report.lengths import length_words
from tonnage.report.lines import table_unit
from tonnage.report.plan import brief, flags, notes, number_words, pace, time_words

_ROWS = 12


def render_plan_page(
    findings: PlanSearch,
    reasons: list[Reason],
    remedies: list[Remedy],
    offers: list[Offer],
    campaign: Campaign = NONE,
) -> str:
    """Return the page; if nothing fits, of the closest plan, with what would fit above it."""
    plan = findings.closest
    lost = [(text(f"{reason.choice} {reason.value}"), text(reason.words, 1000)) for reason in reasons]
    return simple_page(
        text(f"{findings.shape.name} · {findings.cluster.words}"),
        _header(findings, campaign),
        _would_fit(remedies),
        f'<div class="pair">{ledger_section(plan)}{_step(plan) if findings.fits else ""}</div>',
        _next_best(findings),
        _one_more_flag(findings, offers),
        markup.section("Why not", markup.folded(lost, _ROWS, ("", ""), name="reasons", kind="bars"), name="why-not")
        if lost
        else "",
        terms_section(plan.terms, plan.total_bytes),
    )


def _header(findings: PlanSearch, campaign: Campaign) -> str:
    plan, shape = findings.closest, findings.shape
    rate, batch, unit = pace(plan, shape)
    used = f"{share(plan.total_bytes, plan.capacity_bytes)} of {size(plan.capacity_bytes)}"
    tiles = [("memory a GPU", size(plan.total_bytes), used)]
    if findings.fits:
        tiles = [
            (f"{unit} a second", f"{rate:,.0f}", f"on {findings.cluster.gpus:,} GPUs"),
            ("a step", time_words(plan.step_s), f"of {batch:,} {unit}"),
            *tiles,
        ]
    looked = f"{findings.fitting:,} of them fit"
    tiles.append(("configurations", f"{findings.searched:,}", looked))
    whole = campaign_words(plan, campaign, gpus=findings.cluster.gpus) if findings.fits else []
    said = "".join(
        f'<p class="note">{text(words)}</p>' for words in (*whole, *length_words(findings), *notes(findings))
    )
    verdict, kind = ("fits", "ok") if findings.fits else ("does not fit", "oom")
    facts = text(f"{shape.parameters / 1e9:,.2f} B parameters · {findings.cluster.words}")
    chosen = "<pre>" + text("  ".join(flags(plan)), 1000) + "</pre>"
    return markup.head(text(shape.name), verdict, kind, facts, markup.tiles(tiles), chosen, said)


def ledger_section(plan: TrainingPlan) -> str:
    """Return bytes by category at the peak of one GPU, and what is left of it."""
    whole = max(plan.capacity_bytes, plan.total_bytes)
    unit = table_unit(whole)
    parts = [(str(category), category.label, part) for category, part in plan.ledger.ranked()]
    parts += (
        [("free", "free", plan.capacity_bytes - plan.total_bytes)] if plan.total_bytes < plan.capacity_bytes else []
    )
    return markup.section(
        "One GPU at its peak", ledger_table(parts, whole, unit), name="ledger", note=f"in the {text(plan.moment)}"
    )


def ledger_table(parts: Sequence[tuple[str, str, int]], whole: int, unit: str) -> str:
    """Return (colour, name, bytes) parts with their shares: one stacked bar, then a row each."""
    rows = [
        (markup.swatch(kind) + text(name), size(part, unit), share(part, whole), bar([(kind, part)], whole))
        for kind, name, part in parts
    ]
    filled = f'<div class="card">{bar([(kind, part) for kind, _, part in parts], whole)}</div>'
    return filled + markup.table(("", "", "", ""), rows, name="ledger-rows", numbers=(1, 2), kind="bars")


def _step(plan: TrainingPlan) -> str:
    total = plan.step_s
    rows = [
        (
            text(name),
            time_words(seconds),
            f"{100 * seconds / total:.1f} %",
            bar([("tensors", round(seconds * 1e9))], round(total * 1e9)),
        )
        for name, seconds in sorted(plan.parts_s.items(), key=lambda item: -item[1])
        if seconds >= 0.0005 * total
    ]
    hidden = (
        f"and {time_words(plan.hidden_s)} of transfers run behind the arithmetic"
        if plan.hidden_s > 0.0005 * total
        else ""
    )
    table = markup.table(("", "", "", ""), rows, name="step-parts", numbers=(1, 2), kind="bars")
    return markup.section("Where a step goes", table, name="step", note=hidden)


def _next_best(findings: PlanSearch) -> str:
    best = findings.best
    if best is None or not findings.alternatives:
        return ""
    rows = [(brief(plan, best), plan, plan.tokens_per_s / best.tokens_per_s - 1) for plan in findings.alternatives]
    table = _plans(findings.shape, [(brief(best), best, None), *rows], "alternatives")
    return markup.section("This plan and the next best", table, name="next")


def _one_more_flag(findings: PlanSearch, offers: list[Offer]) -> str:
    if not offers or findings.best is None:
        return ""
    rows = [(f"{offer.flag}: {brief(offer.plan)}", offer.plan, offer.gain) for offer in offers]
    others = [f"{offer.flag} trains in other numbers: {offer.change}" for offer in offers if offer.numbers]
    table = _plans(findings.shape, [("this plan", findings.best, None), *rows], "offers")
    return markup.section("With one more flag", table, name="offers", note=text("; ".join(others)))


def _plans(shape: ModelShape, plans: Sequence[tuple[str, TrainingPlan, float | None]], name: str) -> str:
    """Return plans by description, with the gain of each over the best."""
    most = max(plan.tokens_per_s for _, plan, _ in plans)
    rows = [
        (
            text(words),
            f"{pace(plan, shape)[0]:,.0f}",
            "best" if gain is None else f"{100 * gain:+.0f} %",
            size(plan.total_bytes, "GiB"),
            bar([("activations", round(plan.tokens_per_s))], round(most)),
        )
        for words, plan, gain in plans
    ]
    columns = ("", f"{pace(plans[0][1], shape)[2]}/s", "", "a GPU", "")
    return markup.table(columns, rows, name=name, numbers=(1, 2, 3), kind="plans")


def _would_fit(remedies: list[Remedy]) -> str:
    if not remedies:
        return ""
    rows = [
        (
            text(r.change),
            size(r.total_bytes, "GiB"),
            size(r.capacity_bytes, "GiB"),
            f"<code>{text(r.flag, 1000)}</code>",
        )
        for r in remedies
    ]
    columns = ("change", "needs", "of", "how")
    return markup.section("What would fit", markup.table(columns, rows, name="remedies", numbers=(1, 2)), name="advice")


def terms_section(terms: Sequence[Term], total_bytes: int) -> str:
    """Return every term: its bytes, formula, inputs and source."""
    ordered = sorted(terms, key=lambda term: (list(Category).index(term.category), -float(term.size_bytes)))
    rows = []
    for term in ordered:
        size_bytes = round(float(term.size_bytes))
        numbers = ", ".join(f"{name.replace('_', ' ')} {number_words(value)}" for name, value in term.numbers.items())
        arithmetic = f'{text(term.formula, 1000)}<br><span class="faint">{text(numbers, 1000)}</span>'
        name = markup.swatch(str(term.category)) + text(term.name)
        rows.append((name, size(size_bytes), share(size_bytes, total_bytes), arithmetic, text(term.source)))
    columns = ("term", "bytes", "", "arithmetic", "from")
    table = markup.table(columns, rows, name="terms", numbers=(1, 2), kind="terms")
    return markup.section("Term by term, at the peak", table, name="arithmetic")
