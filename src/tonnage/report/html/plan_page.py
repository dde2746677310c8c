"""Plans of training, serving and reinforcement learning as HTML pages that work offline."""

import shlex
from collections.abc import Iterable, Sequence

from tonnage.budget.terms import Term
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape
from tonnage.planner.rl.search import RlFindings
from tonnage.planner.rl.settings import trl_settings, verl_settings
from tonnage.planner.serving.search import ServingPlan
from tonnage.planner.training.search import PlanSearch, TrainingPlan
from tonnage.report.html import markup
from tonnage.report.html.markup import bar, share, simple_page, size, text
from tonnage.report.plans import rl, serving
from tonnage.report.plans.notes import length_words, shortage_words
from tonnage.report.plans.training import (
    TrainingAnswer,
    brief,
    exact_flags,
    flags,
    notes,
    number_words,
    pace,
    speed_words,
    time_words,
    used_words,
)
from tonnage.report.step_time import Campaign, campaign_words
from tonnage.units import percent

_ROWS = 12
_KINDS = ("parameters", "kv_cache", "activations", "gradients", "workspace", "context")


def render_plan_page(answer: TrainingAnswer) -> str:
    """Return the page; if nothing fits, of the closest plan, with what would fit above it."""
    findings, offers = answer.findings, answer.offers
    plan, best, shape = findings.closest, findings.best, findings.shape
    parts = [_header(findings, answer.campaign)]
    if answer.remedies:
        rows = []
        for r in answer.remedies:
            sizes = (size(r.total_bytes, "GiB"), size(r.capacity_bytes, "GiB"))
            rows.append((text(r.change), *sizes, f"<code>{text(r.flag, 1000)}</code>"))
        table = markup.table(("change", "needs", "of", "how"), rows, name="remedies", numbers=(1, 2))
        parts.append(markup.section("What would fit", table, name="advice"))
    if answer.next_plan is not None:
        following = answer.next_plan
        words = _flag_words(exact_flags(following.plan, following.flag))
        note = ", ".join([*speed_words(following.plan, shape), used_words(following.plan)])
        parts.append(markup.section("The next plan that fits", words, name="next-plan", note=text(note)))
    # Bytes by category at the peak of one GPU, and what is left of it.
    held = [(str(category), category.label, part) for category, part in plan.ledger.ranked()]
    free = plan.capacity_bytes - plan.total_bytes
    held += [("free", "free", free)] if free > 0 else []
    table = ledger_table(held, max(plan.capacity_bytes, plan.total_bytes))
    ledger = markup.section("One GPU at its peak", table, name="ledger", note=f"in the {text(plan.moment)}")
    parts.append(f'<div class="pair">{ledger}{_step(plan) if findings.fits else ""}</div>')
    if best is not None and findings.alternatives:
        others = [(brief(p, best), p, p.tokens_per_s / best.tokens_per_s - 1) for p in findings.alternatives]
        table = _plans(shape, [(brief(best), best, None), *others], "alternatives")
        parts.append(markup.section("This plan and the next best", table, name="next"))
    if best is not None and offers:
        others = [(f"{offer.flag}: {brief(offer.plan)}", offer.plan, offer.gain) for offer in offers]
        table = _plans(shape, [("this plan", best, None), *others], "offers")
        note = "; ".join(f"{offer.flag} trains in other numbers: {offer.change}" for offer in offers if offer.numbers)
        parts.append(markup.section("With one more flag", table, name="offers", note=text(note)))
    if answer.reasons:
        lost = [(text(f"{reason.choice} {reason.value}"), text(reason.words, 1000)) for reason in answer.reasons]
        table = markup.folded(lost, _ROWS, ("", ""), name="reasons", kind="bars")
        parts.append(markup.section("Why not", table, name="why-not"))
    title = text(f"{shape.name} · {findings.cluster.words}")
    return simple_page(title, *parts, terms_section(plan.terms, plan.total_bytes))


def _flag_words(flags: Sequence[str]) -> str:
    """Return flags as they are typed; browsers break lines after hyphens, and a flag begins with two."""
    return "<pre>" + " ".join(f"<span>{text(flag, 4000)}</span>" for flag in flags) + "</pre>"


def _failures(reasons: Iterable[str]) -> str:
    """Return what a plan has too little of."""
    return "".join(f'<p class="failure">{text(words, 1000)}</p>' for words in reasons)


def _header(findings: PlanSearch, campaign: Campaign) -> str:
    plan, shape = findings.closest, findings.shape
    rate, batch, unit = pace(plan, shape)
    used = f"{share(plan.total_bytes, plan.capacity_bytes)} of {size(plan.capacity_bytes)}"
    tiles = [("memory a GPU", size(plan.total_bytes), used)]
    if findings.fits:
        speed = (f"{unit} a second", f"{rate:,.0f}", f"on {findings.cluster.gpus:,} GPUs")
        tiles = [speed, ("a step", time_words(plan.step_s), f"of {batch:,} {unit}"), *tiles]
    tiles.append(("configurations", f"{findings.searched:,}", f"{findings.fitting:,} of them fit"))
    whole = campaign_words(plan, campaign, gpus=findings.cluster.gpus) if findings.fits else []
    every = (*whole, *length_words(findings), *notes(findings))
    said = "".join(f'<p class="note">{text(words)}</p>' for words in every)
    verdict, kind = ("fits", "ok") if findings.fits else ("does not fit", "oom")
    facts = text(f"{shape.parameters / 1e9:,.2f} B parameters · {findings.cluster.words}")
    chosen = "<pre>" + text("  ".join(flags(plan)), 1000) + "</pre>"
    reasons = _failures(shortage_words(plan.shortages, plan.loading))
    return markup.head(text(shape.name), verdict, kind, facts, reasons, markup.tiles(tiles), chosen, said)


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
    rows = []
    for words, plan, gain in plans:
        speed = (f"{pace(plan, shape)[0]:,.0f}", "best" if gain is None else f"{100 * gain:+.0f} %")
        filled = bar([("activations", round(plan.tokens_per_s))], round(most))
        rows.append((text(words), *speed, size(plan.total_bytes, "GiB"), filled))
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


def render_serving_page(plan: ServingPlan) -> str:
    """Return the page; if nothing fits, what would comes first."""
    best, budget = plan.best, plan.best.budget
    parts = [_serving_header(plan)]
    if plan.changes:
        changes = [(f"<code>{text(change.flag)}</code>", text(change.words)) for change in plan.changes]
        table = markup.table(("", ""), changes, name="changes", kind="bars")
        parts.append(markup.section(serving.offers_title(plan).capitalize(), table, name="advice"))
    # The ledger, and the KV cache.
    kinds = (*_KINDS, *["fragmentation"] * bool(budget.configuration.reserved_bytes), "free")
    held = [(kind, *row) for kind, row in zip(kinds, serving.ledger_rows(budget, whole=True), strict=True)]
    table = ledger_table([one for one in held if one[2] > 0], max(budget.capacity_bytes, budget.total_bytes))
    ledger = markup.section("Each GPU", table, name="ledger", note=f"of {size(budget.capacity_bytes)}")
    kv = budget.kv
    sizes = [
        ("a token, on one GPU", size(kv.layout.bytes_per_token)),
        (f"blocks of {kv.layout.block} tokens", f"{kv.blocks:,}"),
        ("needed of them", f"{budget.needed_blocks:,}"),
        ("tokens in all", f"{kv.tokens:,}"),
    ]
    cache = markup.section("KV cache", markup.table(("", ""), sizes, name="kv-rows", numbers=(1,)), name="kv")
    parts.append(f'<div class="pair">{ledger}{cache}</div>')
    if plan.fits:
        copies = f", {best.replicas} times behind a balancer" if best.replicas > 1 else ""
        words = _flag_words([shlex.quote(word) for word in serving.launch_words(plan)])
        parts.append(markup.section(f"To launch it{copies}", words, name="launch"))
    if plan.others:
        layouts = []
        for layout in (best, *plan.others):
            asked, lacks = layout.configuration, text(serving.lacks(layout))
            numbers = (layout.most_users, layout.longest_context)
            name, speed = f"tp {asked.tp} pp {asked.pp} × {layout.replicas}", f"{layout.tokens_per_s:,.0f}"
            layouts.append((name, *(f"{number:,}" for number in numbers), speed, lacks))
        columns = ("", "users", "longest context", "tokens/s at most", "")
        table = markup.table(columns, layouts, name="layouts", numbers=(1, 2, 3), kind="plans")
        parts.append(markup.section("This layout and others", table, name="others"))
    parts.append(terms_section(budget.terms, budget.total_bytes))
    parts.append("".join(f'<p class="note">{text(note, 1000)}</p>' for note in budget.notes))
    return simple_page(text(f"{plan.shape.name} · {plan.cluster.words}"), *parts)


def _serving_header(plan: ServingPlan) -> str:
    best, asked = plan.best, plan.best.configuration
    weights = f"{asked.weights} weights, {asked.kv} cache"
    facts = [plan.cluster.words, serving.engine_words(asked), *serving.layout_words(plan), weights]
    tiles = [
        ("asked for", f"{plan.users:,} × {asked.context:,}", "users × tokens"),
        ("most users", f"{best.most_users:,}", f"at {asked.context:,} tokens"),
        ("longest context", f"{best.longest_context:,}", f"for {plan.users:,} user{'s' * (plan.users != 1)}"),
    ]
    if plan.fits:
        each = f"at most; {1 / best.decode_step_s:,.1f} a user"
        tiles.append(("decoded tokens a second", f"{best.tokens_per_s:,.0f}", each))
    verdict, kind = ("fits", "ok") if plan.fits else ("does not fit", "oom")
    reasons = _failures(shortage_words(plan.shortages, best.loading))
    return markup.head(text(plan.shape.name), verdict, kind, text(" · ".join(facts)), reasons, markup.tiles(tiles))


def render_rl_page(found: RlFindings) -> str:
    """Return the page; if nothing fits, what would comes first."""
    best, parts = found.best, [_rl_header(found)]
    if found.remedies:
        remedies = [(f"<code>{text(flag)}</code>", time_words(plan.step_s)) for flag, plan in found.remedies]
        table = markup.table(("", "a step"), remedies, name="changes")
        parts.append(markup.section("What would fit", table, name="advice"))
        flag, following = found.remedies[0]
        words = _flag_words(rl.exact_flags(following, flag))
        parts.append(markup.section("The next plan that fits", words, name="next-plan"))
    # The phases of a step as bars by category.
    whole, capacity = max(best.cluster.gpu.memory_bytes, best.peak.total_bytes), best.cluster.gpu.memory_bytes
    rows, used = [], dict[str, str]()
    for phase in best.phases:
        held = [(str(category), part) for category, part in phase.ledger.ranked()]
        used |= {str(category): category.label for category, _ in phase.ledger.ranked()}
        rows.append((text(phase.name), time_words(phase.seconds), size(phase.total_bytes), bar(held, whole)))
    legend = " ".join(f"{markup.swatch(kind)}{text(name)}" for kind, name in used.items())
    table = markup.table(("", "", "", ""), rows, name="phases", numbers=(1, 2), kind="bars")
    note = f"of {size(capacity)} on each GPU"
    parts.append(markup.section("The phases of a step", table, f"<p>{legend}</p>", name="timeline", note=note))
    trl = trl_settings(best)
    settings = trl or verl_settings(best)
    if settings and found.fits:
        lines = "".join(f"<span>{text(f'{name}={value}', 400)}</span>\n" for name, value in settings.items())
        parts.append(markup.section(f"In {'TRL' if trl else 'verl'}", f"<pre>{lines}</pre>", name="settings"))
    if found.alternatives:
        plans = []
        for plan in (best, *found.alternatives):
            words = text("  ".join(rl.engine_words(plan)), 400)
            plans.append((words, time_words(plan.step_s), size(plan.peak.total_bytes)))
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


def _rl_header(found: RlFindings) -> str:
    plan, asked = found.best, found.request
    work = f"{asked.algorithm}, {asked.prompts:,} × {asked.group:,} completions of {asked.completion:,} tokens"
    facts = [work, *flags(plan.trainer), *rl.engine_words(plan)]
    tiles = [
        ("a step", time_words(plan.step_s), f"{plan.samples_per_s:,.1f} samples/s" if plan.step_s else ""),
        ("tokens a second", f"{plan.tokens_per_s:,.0f}" if plan.step_s else "", "generated and trained on"),
        ("the fullest phase", size(plan.peak.total_bytes), text(plan.peak.name)),
        ("the engine's share", f"{plan.utilization:g}", "gpu_memory_utilization"),
    ]
    verdict, kind = ("fits", "ok") if found.fits else ("does not fit", "oom")
    reasons = _failures(shortage_words(plan.shortages, plan.trainer.loading))
    facts_words = text(" · ".join(facts), 1000)
    return markup.head(text(found.shape.name), verdict, kind, facts_words, reasons, markup.tiles(tiles))
