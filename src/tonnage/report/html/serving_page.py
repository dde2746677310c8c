"""A serving plan as one HTML page that works offline: a GPU's memory, the KV cache, other layouts, how to launch it."""

import shlex

from tonnage.planner.serving.search import ServingPlan
from tonnage.report.html import markup
from tonnage.report.html.markup import simple_page, size, text
from tonnage.report.html.plan_page import ledger_table, terms_section
from tonnage.report.plans.serving import engine_words, launch_words, layout_words, ledger_rows, offers_title

_KINDS = ("parameters", "kv_cache", "activations", "gradients", "workspace", "context")


def render_serving_page(plan: ServingPlan) -> str:
    """Return the page; if nothing fits, what would comes first."""
    best, budget = plan.best, plan.best.budget
    parts = [_header(plan)]
    if not plan.fits:
        needed, available = size(budget.needed_bytes), size(budget.available_bytes)
        parts.append(f'<p class="failure">A GPU needs {needed} for this and has {available}.</p>')
    if plan.changes:
        changes = [(f"<code>{text(change.flag)}</code>", text(change.words)) for change in plan.changes]
        table = markup.table(("", ""), changes, name="changes", kind="bars")
        parts.append(markup.section(offers_title(plan).capitalize(), table, name="advice"))
    # The ledger, and the KV cache.
    kinds = (*_KINDS, *["fragmentation"] * bool(budget.configuration.reserved_bytes), "free")
    held = [(kind, *row) for kind, row in zip(kinds, ledger_rows(budget, whole=True), strict=True)]
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
        # Browsers break lines after hyphens, and a flag begins with two.
        words = " ".join(f"<span>{text(shlex.quote(word), 4000)}</span>" for word in launch_words(plan))
        parts.append(markup.section(f"To launch it{copies}", f"<pre>{words}</pre>", name="launch"))
    if plan.others:
        layouts = []
        for layout in (best, *plan.others):
            asked, lacks = layout.configuration, "" if layout.fits else f"lacks {size(layout.missing_bytes)}"
            numbers = (layout.most_users, layout.longest_context)
            name, speed = f"tp {asked.tp} pp {asked.pp} × {layout.replicas}", f"{layout.tokens_per_s:,.0f}"
            layouts.append((name, *(f"{number:,}" for number in numbers), speed, lacks))
        columns = ("", "users", "longest context", "tokens/s at most", "")
        table = markup.table(columns, layouts, name="layouts", numbers=(1, 2, 3), kind="plans")
        parts.append(markup.section("This layout and others", table, name="others"))
    parts.append(terms_section(budget.terms, budget.total_bytes))
    parts.append("".join(f'<p class="note">{text(note, 1000)}</p>' for note in budget.notes))
    return simple_page(text(f"{plan.shape.name} · {plan.cluster.words}"), *parts)


def _header(plan: ServingPlan) -> str:
    best, asked = plan.best, plan.best.configuration
    weights = f"{asked.weights} weights, {asked.kv} cache"
    facts = [plan.cluster.words, engine_words(asked), *layout_words(plan), weights]
    tiles = [
        ("asked for", f"{plan.users:,} × {asked.context:,}", "users × tokens"),
        ("most users", f"{best.most_users:,}", f"at {asked.context:,} tokens"),
        ("longest context", f"{best.longest_context:,}", f"for {plan.users:,} user{'s' * (plan.users != 1)}"),
    ]
    if plan.fits:
        each = f"at most; {1 / best.decode_step_s:,.1f} a user"
        tiles.append(("decoded tokens a second", f"{best.tokens_per_s:,.0f}", each))
    verdict, kind = ("fits", "ok") if plan.fits else ("does not fit", "oom")
    return markup.head(text(plan.shape.name), verdict, kind, text(" · ".join(facts)), markup.tiles(tiles))
