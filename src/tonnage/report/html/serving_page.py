"""A serving plan as one HTML page that works offline: a GPU's memory, the KV cache, other layouts, how to launch it."""

import shlex
from collections.abc import Iterator

from tonnage.planner.serving import ServingLayout, ServingPlan
from tonnage.report.html import markup
from tonnage.report.html.markup import size, text
from tonnage.report.html.plan_page import ledger_table, terms_section
from tonnage.report.html.shell import simple_page
from tonnage.report.lines import table_unit
from tonnage.report.serving import engine_words, launch_words, ledger_rows, offers_title

_KINDS = ("parameters", "kv_cache", "activations", "gradients", "workspace", "context")


def render_serving_page(plan: ServingPlan) -> str:
    """Return the page; if nothing fits, what would comes first."""
    budget = plan.best.budget
    needed, available = size(budget.needed_bytes), size(budget.available_bytes)
    return simple_page(
        text(f"{plan.shape.name} · {plan.cluster.words}"),
        _header(plan),
        "" if plan.fits else f'<p class="failure">A GPU needs {needed} for this and has {available}.</p>',
        _offers(plan),
        f'<div class="pair">{_ledger(plan)}{_cache(plan)}</div>',
        _launch(plan),
        _layouts(plan),
        terms_section(budget.terms, budget.total_bytes),
        "".join(f'<p class="note">{text(note, 1000)}</p>' for note in budget.notes),
    )


def _header(plan: ServingPlan) -> str:
    best, asked = plan.best, plan.best.configuration
    engine = engine_words(asked)
    layout = [f"{word} {number}" for word, number in (("tp", asked.tp), ("pp", asked.pp)) if number > 1]
    layout += [f"{best.replicas} copies"] if best.replicas > 1 else []
    facts = [plan.cluster.words, engine, *layout, f"{asked.weights} weights, {asked.kv} cache"]
    tiles = [
        ("asked for", f"{plan.users:,} × {asked.context:,}", "users × tokens"),
        ("most users", f"{best.most_users:,}", f"at {asked.context:,} tokens"),
        ("longest context", f"{best.longest_context:,}", f"for {plan.users:,} user{'s' * (plan.users != 1)}"),
    ]
    if plan.fits:
        tiles.append(
            ("decoded tokens a second", f"{best.tokens_per_s:,.0f}", f"at most; {1 / best.decode_step_s:,.1f} a user")
        )
    verdict, kind = ("fits", "ok") if plan.fits else ("does not fit", "oom")
    return markup.head(text(plan.shape.name), verdict, kind, text(" · ".join(facts)), markup.tiles(tiles))


def _offers(plan: ServingPlan) -> str:
    if not plan.changes:
        return ""
    rows = [(f"<code>{text(change.flag)}</code>", text(change.words)) for change in plan.changes]
    title = offers_title(plan).capitalize()
    return markup.section(title, markup.table(("", ""), rows, name="changes", kind="bars"), name="advice")


def _ledger(plan: ServingPlan) -> str:
    budget = plan.best.budget
    parts = [(kind, name, part) for kind, (name, part) in zip(_KINDS, ledger_rows(budget), strict=True) if part]
    others = budget.configuration.reserved_bytes
    parts += [("fragmentation", "others", others)] if others else []
    free = budget.capacity_bytes - budget.total_bytes - others
    parts += [("free", "free", free)] if free > 0 else []
    whole = max(budget.capacity_bytes, budget.total_bytes)
    table = ledger_table(parts, whole, table_unit(whole))
    return markup.section("Each GPU", table, name="ledger", note=f"of {size(budget.capacity_bytes)}")


def _cache(plan: ServingPlan) -> str:
    kv, needed = plan.best.budget.kv, plan.best.budget.needed_blocks
    rows = [
        ("a token, on one GPU", size(kv.layout.bytes_per_token)),
        (f"blocks of {kv.layout.block} tokens", f"{kv.blocks:,}"),
        ("needed of them", f"{needed:,}"),
        ("tokens in all", f"{kv.tokens:,}"),
    ]
    return markup.section("KV cache", markup.table(("", ""), rows, name="kv-rows", numbers=(1,)), name="kv")


def _launch(plan: ServingPlan) -> str:
    if not plan.fits:
        return ""
    copies = f", {plan.best.replicas} times behind a balancer" if plan.best.replicas > 1 else ""
    # Browsers break lines after hyphens, and a flag begins with two.
    words = " ".join(f"<span>{text(shlex.quote(word), 4000)}</span>" for word in launch_words(plan))
    command = f"<pre>{words}</pre>"
    return markup.section(f"To launch it{copies}", command, name="launch")


def _layouts(plan: ServingPlan) -> str:
    if not plan.others:
        return ""
    rows = [tuple(_layout(layout)) for layout in (plan.best, *plan.others)]
    columns = ("", "users", "longest context", "tokens/s at most", "")
    table = markup.table(columns, rows, name="layouts", numbers=(1, 2, 3), kind="plans")
    return markup.section("This layout and others", table, name="others")


def _layout(layout: ServingLayout) -> Iterator[str]:
    asked = layout.configuration
    yield f"tp {asked.tp} pp {asked.pp} × {layout.replicas}"
    yield f"{layout.most_users:,}"
    yield f"{layout.longest_context:,}"
    yield f"{layout.tokens_per_s:,.0f}"
    yield "" if layout.fits else f"lacks {size(layout.missing_bytes)}"
