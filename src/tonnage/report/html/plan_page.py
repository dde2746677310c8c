"""A training plan as one HTML page that works offline: the plan, its ledger, its step, alternatives, reasons, every
term.
"""

from collections.abc import Sequence

from tonnage.budget.terms import Term
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape
from tonnage.planner.training.offers import Offer
from tonnage.planner.training.reasons import Reason
from tonnage.planner.training.remedies import Remedy
from tonnage.planner.training.search import PlanSearch, TrainingPlan
from tonnage.report.campaign import NONE, Campaign, campaign_words
from tonnage.report.html import markup
from tonnage.report.html.markup import bar, share, simple_page, size, text
from tonnage.report.plans.notes import length_words
from tonnage.report.plans.training import brief, flags, notes, number_words, pace, time_words
from tonnage.units import percent

_ROWS = 12


def render_plan_page(
    findings: PlanSearch,
    reasons: list[Reason],
    remedies: list[Remedy],
    offers: list[Offer],
    campaign: Campaign = NONE,
) -> str:
    """Return the page; if nothing fits, of the closest plan, with what would fit above it."""
    plan, best, shape = findings.closest, findings.best, findings.shape
    parts = [_header(findings, campaign)]
    if remedies:
        rows = [
            (
                text(r.change),
                size(r.total_bytes, "GiB"),
                size(r.capacity_bytes, "GiB"),
                f"<code>{text(r.flag, 1000)}</code>",
            )
            for r in remedies
        ]
        table = markup.table(("change", "needs", "of", "how"), rows, name="remedies", numbers=(1, 2))
        parts.append(markup.section("What would fit", table, name="advice"))
    parts.append(f'<div class="pair">{ledger_section(plan)}{_step(plan) if findings.fits else ""}</div>')
    if best is not None and findings.alternatives:
        others = [(brief(p, best), p, p.tokens_per_s / best.tokens_per_s - 1) for p in findings.alternatives]
        table = _plans(shape, [(brief(best), best, None), *others], "alternatives")
        parts.append(markup.section("This plan and the next best", table, name="next"))
    if best is not None and offers:
        others = [(f"{offer.flag}: {brief(offer.plan)}", offer.plan, offer.gain) for offer in offers]
        table = _plans(shape, [("this plan", best, None), *others], "offers")
        note = "; ".join(f"{offer.flag} trains in other numbers: {offer.change}" for offer in offers if offer.numbers)
        parts.append(markup.section("With one more flag", table, name="offers", note=text(note)))
    if reasons:
        lost = [(text(f"{reason.choice} {reason.value}"), text(reason.words, 1000)) for reason in reasons]
        table = markup.folded(lost, _ROWS, ("", ""), name="reasons", kind="bars")
        parts.append(markup.section("Why not", table, name="why-not"))
    title = text(f"{shape.name} · {findings.cluster.words}")
    return simple_page(title, *parts, terms_section(plan.terms, plan.total_bytes))


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
    parts = [(str(category), category.label, part) for category, part in plan.ledger.ranked()]
    free = plan.capacity_bytes - plan.total_bytes
    parts += [("free", "free", free)] if free > 0 else []
    table = ledger_table(parts, max(plan.capacity_bytes, plan.total_bytes))
    return markup.section("One GPU at its peak", table, name="ledger", note=f"in the {text(plan.moment)}")


def ledger_table(parts: Sequence[tuple[str, str, int]], whole: int) -> str:
    """Return (colour, name, bytes) parts with their shares: one stacked bar, then a row each."""
    filled = f'<div class="card">{bar([(kind, part) for kind, _, part in parts], whole)}</div>'
    rows = markup.ledger(parts, whole)
    return filled + markup.table(("", "", "", ""), rows, name="ledger-rows", numbers=(1, 2), kind="bars")


def _step(plan: TrainingPlan) -> str:
    total = plan.step_s
    rows = []
    for name, seconds in sorted(plan.parts_s.items(), key=lambda item: -item[1]):
        if seconds >= 0.0005 * total:
            filled = bar([("tensors", round(seconds * 1e9))], round(total * 1e9))
            rows.append((text(name), time_words(seconds), percent(seconds / total), filled))
    is_hidden = plan.hidden_s > 0.0005 * total
    note = f"and {time_words(plan.hidden_s)} of transfers run behind the arithmetic" if is_hidden else ""
    table = markup.table(("", "", "", ""), rows, name="step-parts", numbers=(1, 2), kind="bars")
    return markup.section("Where a step goes", table, name="step", note=note)


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
