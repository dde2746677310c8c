"""A serving plan for people and for programs: the ledger of one GPU, the KV cache, who fits, and how to launch it.

It computes nothing but shares and sums for display.
"""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from tonnage import __version__
from tonnage.budget.kv_cache import average_waste
from tonnage.budget.loading import serving_loading
from tonnage.budget.own_engine import BATCHED_TOKENS, MAX_SEQS
from tonnage.budget.serving import ServingBudget, ServingConfiguration
from tonnage.budget.terms import Term
from tonnage.budget.vllm import GRAPHS
from tonnage.budget.weights import WEIGHT_FORMATS
from tonnage.ledger import Category
from tonnage.models.presets import hub_id
from tonnage.planner.serving import Layout, ServingPlan
from tonnage.report.lines import (
    bar,
    beside,
    column,
    cut,
    heading,
    packed,
    report_width,
    spread,
    table,
    table_unit,
    wrapped,
)
from tonnage.report.loading import loading_figures, loading_words
from tonnage.units import format_bytes, percent

OTHERS = 4
_BAR = 34


def serving_lines(plan: ServingPlan, *, explain: bool = False) -> Iterator[Text | str]:
    """The report."""
    yield from _headline(plan)
    yield ""
    yield from _ledger(plan.best.budget)
    yield ""
    yield from _cache(plan)
    if explain:
        yield ""
        yield from explain_lines(plan.best.budget)
    if not plan.fits:
        yield ""
        yield from _shortage(plan)
    yield from _offers(plan)
    yield from _layouts(plan)
    loading = serving_loading(plan.shape, plan.best.budget, plan.cluster.gpus_per_host)
    yield ""
    for words in loading_words(loading, plan.cluster):
        yield from (Text(line, style="dim") for line in wrapped(words, rest="    "))
    for note in plan.best.budget.notes:
        yield from (Text(line, style="yellow") for line in wrapped(note))
    if plan.fits:
        yield ""
        yield from _launch(plan)


def _headline(plan: ServingPlan) -> Iterator[Text | str]:
    asked, gpu = plan.best.configuration, plan.cluster.gpu
    engine = f"vLLM {asked.engine_version}" if asked.engine == "vllm" else "tonnage"
    count = f"{plan.cluster.gpus} × " if plan.cluster.gpus > 1 else ""
    verdict = Text("fits", "green") if plan.fits else Text("does not fit", "red")
    yield from spread(Text(f"  {plan.shape.name} · {count}{gpu.name} · {engine}"), verdict)
    parts = [f"{_users(plan.users)} × {asked.context:,} tokens"]
    parts += [f"{word} {number}" for word, number in (("tp", asked.tp), ("pp", asked.pp)) if number > 1]
    parts += [f"{plan.best.replicas} copies"] if plan.best.replicas > 1 else []
    yield from wrapped(" · ".join([*parts, f"{asked.weights} weights, {asked.kv} cache"]))
    if asked.stage_layers:
        yield from wrapped(f"layers of the stages: {', '.join(map(str, asked.stage_layers))}", rest="    ")


def _users(number: int) -> str:
    return f"{number:,} user{'s' * (number != 1)}"


def ledger_rows(budget: ServingBudget) -> list[tuple[str, int]]:
    """What one GPU holds, in the order that people ask for it."""
    graphs = sum(int(term.size_bytes) for term in budget.terms if term.name == GRAPHS)
    ledger = budget.ledger
    return [
        ("weights", ledger[Category.PARAMETERS]),
        ("KV cache", ledger[Category.KV_CACHE]),
        ("activations", ledger[Category.ACTIVATIONS]),
        ("CUDA graphs", graphs),
        ("workspace", ledger[Category.WORKSPACE] - graphs),
        ("context", ledger[Category.CONTEXT]),
    ]


def _ledger(budget: ServingBudget) -> Iterator[Text | str]:
    unit = table_unit(budget.capacity_bytes)
    rows = ledger_rows(budget)
    rows.append(("free", budget.capacity_bytes - budget.total_bytes))
    yield heading(f"each GPU, of {format_bytes(budget.capacity_bytes, unit)}")
    for word, size in rows:
        share = size / budget.capacity_bytes
        yield f"  {word:<14}{column(size, unit)} {percent(share):>7}  {bar(share, _BAR)}".rstrip()


def _cache(plan: ServingPlan) -> Iterator[Text | str]:
    best, asked = plan.best, plan.best.configuration
    kv, layout = best.budget.kv, best.budget.kv.layout
    groups = f" in {len(layout.groups)} groups" if len(layout.groups) > 1 else ""
    yield heading("KV cache")
    yield from wrapped(
        f"{format_bytes(layout.bytes_per_token)} a token a GPU · "
        f"{kv.blocks:,} blocks of {layout.block}{groups} · {kv.tokens:,} tokens"
    )
    yield from _row(f"most users at {asked.context:,} tokens", best.most_users)
    limit = plan.shape.max_positions
    beyond = f"the model has {limit:,}" if 0 < limit < best.longest_context else ""
    yield from _row(f"longest context for {_users(plan.users)}", best.longest_context, beyond)
    yield from _waste(plan)
    if plan.fits:
        yield from _row(
            "decoded tokens a second, at most", round(best.tokens_per_s), f"{1 / best.decode_step_s:,.1f} a user"
        )


def _row(words: str, number: int, more: str = "") -> list[str]:
    """A number behind its words, and behind it what there is to say of it: what lacks room stands below."""
    return packed([f"{words:<40}{number:>12,}", more], gap="  ")


def _waste(plan: ServingPlan) -> Iterator[str]:
    """Sequences that are half grown on average."""
    best, asked = plan.best, plan.best.configuration
    half = -(-asked.context // 2)
    found = average_waste(asked.users, half, asked.context, best.budget.kv.layout.block)
    paged = best.replicas * best.budget.kv.most_users(half, min(asked.shared_prefix, half))
    yield from _row("half grown, users in pages", paged, f"{percent(found.paged_share, 2)} wasted")
    yield from _row(
        "half grown, users in contiguous rows", best.most_users, f"{percent(found.contiguous_share, 0)} wasted"
    )


def _shortage(plan: ServingPlan) -> Iterator[Text | str]:
    budget = plan.best.budget
    pool = (budget.needed_blocks * budget.kv.layout.bytes_per_block, "KV cache")
    rest = [(size, word) for word, size in ledger_rows(budget) if word != "KV cache"]
    largest = sorted([pool, *rest], reverse=True)[:3]
    words = ", ".join(f"{word} {format_bytes(size, 'GiB')}" for size, word in largest)
    yield heading("what is missing")
    sizes = (("needed", budget.needed_bytes), ("available", budget.available_bytes))
    yield from packed([*(f"{word} {format_bytes(size, 'GiB')}" for word, size in sizes), "a GPU"])
    yield from wrapped(f"largest: {words}", rest="    ")


def _offers(plan: ServingPlan) -> Iterator[Text | str]:
    if not plan.changes:
        return
    yield ""
    yield heading("what leaves more room" if plan.fits else "what would fit")
    width = max(len(change.flag) for change in plan.changes)
    for change in plan.changes:
        yield from wrapped(change.words, first=f"   {change.flag:<{width}}  ")


def _layouts(plan: ServingPlan) -> Iterator[Text | str]:
    if not plan.others:
        return
    yield ""
    heads = ("other layouts", "users", "longest context", "tokens/s at most", "")
    head, *rows = table([heads, *map(_layout_cells, plan.others[:OTHERS])], align="<>>><", spare=(2,))
    yield Text(head, style="bold")
    yield from rows


def _layout_cells(layout: Layout) -> tuple[str, ...]:
    asked = layout.configuration
    numbers = (layout.most_users, layout.longest_context, round(layout.tokens_per_s))
    why = "" if layout.fits else f"lacks {format_bytes(layout.missing_bytes)}"
    return f" tp {asked.tp} pp {asked.pp} × {layout.replicas}", *(f"{number:,}" for number in numbers), why


def _launch(plan: ServingPlan) -> Iterator[Text | str]:
    words = launch_words(plan)
    copies = f", {plan.best.replicas} times behind a balancer" if plan.best.replicas > 1 else ""
    hosts = plan.launch.hosts if plan.best.configuration.engine == "vllm" else 1
    yield heading(f"launch{copies}" + (f", with Ray on {hosts} hosts" if hosts > 1 else ""))
    first = words.index("serve") + 2
    line = "   " + shlex.join(words[:first])
    for flag in _pairs(words[first:]):
        if len(line) + len(flag) + 3 > report_width():
            yield line + " \\"
            line = "    "
        line += " " + flag
    yield line
    if hosts > 1:
        hint = "--export DIR writes what starts Ray on each host, waits for all, then serves"
        yield from (Text(line, style="dim") for line in wrapped(hint))
    weights = plan.best.configuration.weights
    if (
        plan.best.configuration.engine == "vllm"
        and WEIGHT_FORMATS[weights].quantized
        and weights not in ("fp8", plan.shape.dtype)
    ):
        hint = f"name a checkpoint of this model that is quantised to {weights}"
        yield from (Text(line, style="dim") for line in wrapped(hint))


def _pairs(words: Sequence[str]) -> Iterator[str]:
    """Flags with their values."""
    held: list[str] = []
    for word in words:
        if word.startswith("--") and held:
            yield shlex.join(held)
            held = []
        held.append(word)
    if held:
        yield shlex.join(held)


def launch_words(plan: ServingPlan) -> list[str]:
    """The command that starts it."""
    asked = plan.best.configuration
    if asked.engine == "tonnage":
        return ["tonnage", "serve", hub_id(plan.model), *_own_flags(asked, plan.shape.dtype)]
    from tonnage.planner.export import vllm

    launch = plan.launch
    variables = vllm.environment(launch) if asked.stage_layers else []
    return [
        *(["env", *variables] if variables else []),
        "vllm",
        "serve",
        vllm.served_model(launch),
        *vllm.flags(launch),
    ]


def _own_flags(asked: ServingConfiguration, dtype: str) -> Iterator[str]:
    """Those that differ from the defaults; share and context always, so that the same blocks come out."""
    yield from ("--budget", f"{asked.utilization:g}", "--context", str(asked.context))
    usual = ServingConfiguration(max_seqs=MAX_SEQS, batched_tokens=BATCHED_TOKENS)
    for flag, name in (("--max-seqs", "max_seqs"), ("--batched-tokens", "batched_tokens"), ("--block", "block")):
        if getattr(asked, name) != getattr(usual, name):
            yield from (flag, str(getattr(asked, name)))
    yield from ("--weights", asked.weights) if asked.weights in ("fp8", "int8") and asked.weights != dtype else ()
    yield from ("--kv", "fp8") if asked.kv == "fp8" else ()
    yield from ("--eager",) if asked.eager else ()


def explain_lines(budget: ServingBudget) -> Iterator[Text | str]:
    """The arithmetic, term by term."""
    yield heading("the arithmetic")
    share = budget.configuration.utilization
    yield from wrapped(f"share of the card: {budget.capacity_bytes:,} × {share:g} = {budget.limit_bytes:,} B")
    for term in budget.terms:
        yield from _explained(term)
    yield from _explained_blocks(budget)


def _explained_blocks(budget: ServingBudget) -> Iterator[str]:
    asked, layout = budget.configuration, budget.kv.layout
    groups = f"{len(layout.groups)} group{'s' * (len(layout.groups) > 1)}"
    yield from wrapped(f"a block: {layout.bytes_per_block:,} B; a token: {layout.bytes_per_token:,} B in {groups}")
    each = layout.sequence_blocks(asked.context, budget.kv.batched_tokens)
    yield from wrapped(f"a sequence of {asked.context:,} tokens: {each:,} blocks")
    yield from wrapped(
        f"{asked.users:,} of them and the null block: {budget.needed_blocks:,} blocks of {budget.kv.blocks:,}"
    )


def _explained(term: Term) -> Iterator[str]:
    label = "weights" if term.category is Category.PARAMETERS else term.category.label
    figures = f"{int(term.size_bytes):>18,} B  {cut(term.source, 20)}"
    yield from beside(f"{label}: {term.name}", min(36, report_width() - 2 - len(figures)), figures, rest="    ")
    numbers = [
        f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{name.replace('_', ' ')} {value}"
        for name, value in term.numbers.items()
    ]
    for words in (f"= {term.formula}", ", ".join(numbers)):
        yield from wrapped(words, first="     ", rest="       ")


def serving_figures(plan: ServingPlan) -> dict[str, Any]:
    """The keys that scripts rely on. Sizes are of one GPU, the fullest."""
    best, budget = plan.best, plan.best.budget
    asked = best.configuration
    return {
        "tonnage": __version__,
        "fits": plan.fits,
        "model": {"name": plan.shape.name, "parameters": plan.shape.parameters, "exact": plan.shape.exact},
        "gpu": plan.cluster.gpu.name,
        "gpus": plan.cluster.gpus,
        "capacity_bytes": budget.capacity_bytes,
        "needed_bytes": budget.needed_bytes,
        "available_bytes": budget.available_bytes,
        "config": _configuration(best) | {"users": plan.users, "replicas": best.replicas},
        "ledger": _ledger_figures(budget),
        "loading": loading_figures(serving_loading(plan.shape, budget, plan.cluster.gpus_per_host), plan.cluster),
        "kv": _kv_figures(plan),
        "most_users": best.most_users,
        "longest_context": best.longest_context,
        "decode": {"step_s": best.decode_step_s, "tokens_per_s": best.tokens_per_s},
        "changes": [{"flag": each.flag, "users": each.users, "context": each.context} for each in plan.changes],
        "alternatives": [_layout_figures(layout) for layout in plan.others],
        "terms": [_term_figures(term) for term in budget.terms],
        "launch": launch_words(plan),
        "notes": list(budget.notes),
        "users_per_replica": asked.users,
    }


def _configuration(layout: Layout) -> dict[str, Any]:
    asked = layout.configuration
    names = (
        "engine", "engine_version", "tp", "pp", "stage_layers", "context", "shared_prefix", "weights", "kv", "block",
        "utilization", "max_seqs", "batched_tokens", "eager",
    )  # fmt: skip
    return {name: getattr(asked, name) for name in names}


def _ledger_figures(budget: ServingBudget) -> dict[str, int]:
    keys = ("parameters", "kv_cache", "activations", "graphs", "workspace", "context")
    figures = {f"{key}_bytes": size for key, (_, size) in zip(keys, ledger_rows(budget), strict=True)}
    return figures | {"total_bytes": budget.total_bytes}


def _kv_figures(plan: ServingPlan) -> dict[str, Any]:
    asked, kv = plan.best.configuration, plan.best.budget.kv
    found = average_waste(asked.users, -(-asked.context // 2), asked.context, kv.layout.block)
    return {
        "bytes_per_token": kv.layout.bytes_per_token,
        "bytes_per_block": kv.layout.bytes_per_block,
        "block": kv.layout.block,
        "groups": len(kv.layout.groups),
        "available_bytes": kv.available_bytes,
        "blocks": kv.blocks,
        "tokens": kv.tokens,
        "max_concurrency": kv.max_concurrency(asked.context),
        "needed_blocks": plan.best.budget.needed_blocks,
        "contiguous_waste": found.contiguous_share,
        "paged_waste": found.paged_share,
    }


def _layout_figures(layout: Layout) -> dict[str, Any]:
    return {
        "tp": layout.configuration.tp,
        "pp": layout.configuration.pp,
        "replicas": layout.replicas,
        "fits": layout.fits,
        "missing_bytes": layout.missing_bytes,
        "most_users": layout.most_users,
        "tokens_per_s": layout.tokens_per_s,
    }


def _term_figures(term: Term) -> dict[str, Any]:
    return {
        "category": str(term.category),
        "name": term.name,
        "size_bytes": int(term.size_bytes),
        "formula": term.formula,
        "numbers": dict(term.numbers),
        "source": term.source,
    }
