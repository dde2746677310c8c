"""A serving plan as text and as JSON values: the ledger of one GPU, the KV cache, who fits, and how to launch it."""

import shlex
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from tonnage import __version__
from tonnage.budget.serving.kv_cache import average_waste
from tonnage.budget.serving.llama_cpp import LlamaBudget
from tonnage.budget.serving.memory import ServingBudget, ServingConfiguration
from tonnage.budget.serving.own_engine import BATCHED_TOKENS, MAX_SEQS
from tonnage.budget.serving.vllm import GRAPHS
from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.ledger import Category
from tonnage.models.presets import hub_id
from tonnage.planner.serving.search import ServingLayout, ServingPlan
from tonnage.report.lines import (
    beside,
    column,
    cut,
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
from tonnage.report.plans.notes import loading_figures, loading_words, shortage_figures, shortage_words
from tonnage.units import format_bytes, percent

OTHERS = 4
# Each engine's flag for its share of the card.
SHARE_FLAGS = {
    "vllm": "--gpu-memory-utilization",
    "sglang": "--mem-fraction-static",
    "tensorrt-llm": "--kv_cache_free_gpu_memory_fraction",
    "tonnage": "--budget",
}


_CONFIGURATION = (
    "engine engine_version tp pp stage_layers context shared_prefix weights kv block utilization max_seqs batched_tokens "
    "eager reserved_bytes"
)
_ALTERNATIVE = "tp:configuration.tp pp:configuration.pp replicas fits missing_bytes most_users tokens_per_s"


def serving_lines(plan: ServingPlan, *, explain: bool = False) -> Iterator[Text | str]:
    """Yield the lines of the report."""
    asked, cluster, budget = plan.best.configuration, plan.cluster, plan.best.budget
    # What was asked for, and whether it fits.
    count = f"{cluster.gpus} × " if cluster.gpus > 1 else ""
    verdict = Text("fits", "green") if plan.fits else Text("does not fit", "red")
    title = Text(f"  {plan.shape.name} · {count}{cluster.gpu.name} · {engine_words(asked)}")
    parts = [f"{_users(plan.users)} × {asked.context:,} tokens", *layout_words(plan)]
    parts.append(f"{asked.weights} weights, {asked.kv} cache")
    head: list[Text | str] = [*spread(title, verdict), *wrapped(" · ".join(parts))]
    for words in shortage_words(plan.shortages, plan.best.loading):
        head += said(words, "red", rest="    ")
    if asked.stage_layers:
        head += wrapped(f"layers of the stages: {', '.join(map(str, asked.stage_layers))}", rest="    ")
    # The memory of a GPU.
    capacity, unit = budget.capacity_bytes, table_unit(budget.capacity_bytes)
    ledger = [heading(f"each GPU, of {format_bytes(capacity, unit)}")]
    for word, size in ledger_rows(budget, whole=True):
        ledger.append(ledger_row(word, f"{column(size, unit)} ", size / capacity, width=14, cells=34, wide=7))
    # Loading, and what the figures rest on.
    notes = list(said(loading_words(plan.best.loading, cluster), "dim", rest="    "))
    notes += [line for note in budget.notes for line in said(note, "yellow")]
    return spaced(
        *(head, ledger, _placement(plan), _cache(plan), _beside(plan), _explained(budget) if explain else ()),
        *(_shortage(plan), _offers(plan), _layouts(plan), notes, _launch(plan)),
    )


def layout_words(plan: ServingPlan) -> list[str]:
    """Return the degrees and copies of a plan that are not one."""
    asked, copies = plan.best.configuration, plan.best.replicas
    words = [f"{word} {number}" for word, number in (("tp", asked.tp), ("pp", asked.pp)) if number > 1]
    return words + [f"{copies} copies"] * (copies > 1)


def engine_words(asked: ServingConfiguration) -> str:
    """Return the engine and its version, like "SGLang 0.5.18"."""
    name = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}.get(asked.engine, asked.engine)
    return f"{name} {asked.engine_version}".rstrip()


def _placement(plan: ServingPlan) -> Iterator[Text | str]:
    """Yield which layers llama.cpp puts where, and what the host holds."""
    budget = plan.best.budget
    if not isinstance(budget, LlamaBudget):
        return
    yield heading("where it lies")
    cards = f" on {len(budget.cards)} GPUs" if len(budget.cards) > 1 else " on the GPU"
    counts = ", ".join(str(card.layers) for card in budget.cards)
    parts = f" ({counts})" if len(budget.cards) > 1 else ""
    yield from wrapped(f"{budget.gpu_layers} of {budget.layers} layers{cards}{parts}, the head counted")
    if budget.configuration.cpu_experts:
        count = min(budget.configuration.cpu_experts, budget.layers - 1)
        yield from wrapped(f"experts of the first {count} layers on the host")
    if not plan.cluster.host_memory_bytes:
        yield from wrapped("memory is unified: the embedding lies in it too")
        return
    host, have = format_bytes(budget.host.total, "GiB"), format_bytes(budget.host_capacity_bytes, "GiB")
    sizes = f"weights {format_bytes(budget.host.weights, 'GiB')}, KV cache {format_bytes(budget.host.cache, 'GiB')}"
    yield from wrapped(
        f"on the host {host} of {have}: {sizes}, read at {plan.cluster.host_memory_bytes_per_s / 1e9:,.0f} GB/s"
    )


def _beside(plan: ServingPlan) -> Iterator[Text | str]:
    """Yield what else is on the cards, and the share of each engine."""
    if plan.neighbours:
        yield heading("beside it, started before it and one after the other")
    for each in plan.neighbours:
        words = [each.words, format_bytes(each.claimed_bytes, "GiB")]
        if each.share:
            engine = each.plan.best.configuration.engine if each.plan is not None else ""
            words.append(f"{SHARE_FLAGS.get(engine, '--gpu-memory-utilization')} {each.share:g}")
        if each.plan is not None:
            words.append(f"{_users(_most_users(each.plan))} at most")
        yield from wrapped(" · ".join(words), rest="    ")
    asked = plan.best.configuration
    if plan.neighbours and asked.engine in SHARE_FLAGS:
        yield from wrapped(f"{plan.shape.name} itself · {SHARE_FLAGS[asked.engine]} {asked.utilization:g}", rest="    ")


def _users(number: int) -> str:
    return f"{number:,} user{'s' * (number != 1)}"


def _most_users(plan: ServingPlan) -> int:
    return min(plan.best.most_users, plan.best.configuration.max_seqs)


def ledger_rows(budget: ServingBudget, *, whole: bool = False) -> list[tuple[str, int]]:
    """Return what one GPU holds, in reading order; of a `whole` card, also what others hold and what is free."""
    graphs = sum(int(term.size_bytes) for term in budget.terms if term.name == GRAPHS)
    ledger, others = budget.ledger, budget.configuration.reserved_bytes
    rows = [
        ("weights", ledger[Category.PARAMETERS]),
        ("KV cache", ledger[Category.KV_CACHE]),
        ("activations", ledger[Category.ACTIVATIONS]),
        ("CUDA graphs", graphs),
        ("workspace", ledger[Category.WORKSPACE] - graphs),
        ("context", ledger[Category.CONTEXT]),
    ]
    if whole:
        rows += [("others", others)] if others else []
        rows.append(("free", budget.capacity_bytes - budget.total_bytes - others))
    return rows


def _cache(plan: ServingPlan) -> Iterator[Text | str]:
    best, asked = plan.best, plan.best.configuration
    kv, layout = best.budget.kv, best.budget.kv.layout
    groups = f" in {len(layout.groups)} groups" if len(layout.groups) > 1 else ""
    yield heading("KV cache")
    llama = asked.engine == "llama.cpp"
    blocks = f"{kv.blocks:,} blocks of {layout.block}{groups} · " if layout.block > 1 else ""
    held = f"{kv.blocks:,} cells" if llama else f"{blocks}{kv.tokens:,} tokens"
    yield from wrapped(f"{format_bytes(layout.bytes_per_token)} a token{'' if llama else ' a GPU'} · {held}")
    limit = plan.shape.max_positions
    beyond = f"the model has {limit:,}" if 0 < limit < best.longest_context else ""
    rows = [(f"most users at {asked.context:,} tokens", best.most_users, "")]
    rows.append((f"longest context for {_users(plan.users)}", best.longest_context, beyond))
    if not llama:
        # The waste for sequences that are half grown on average.
        half = -(-asked.context // 2)
        found = average_waste(asked.users, half, asked.context, layout.block)
        paged = best.replicas * kv.most_users(half, min(asked.shared_prefix, half))
        rows.append(("half grown, users in pages", paged, f"{percent(found.paged_share, 2)} wasted"))
        wasted = f"{percent(found.contiguous_share, 0)} wasted"
        rows.append(("half grown, users in contiguous rows", best.most_users, wasted))
    if plan.fits:
        each = f"{1 / best.decode_step_s:,.1f} a user"
        rows.append(("decoded tokens a second, at most", round(best.tokens_per_s), each))
    for words, number, more in rows:
        yield from packed([f"{words:<40}{number:>12,}", more], gap="  ")


def _shortage(plan: ServingPlan) -> Iterator[Text | str]:
    budget = plan.best.budget
    if not any(demand.part == "GPU" for demand in plan.shortages):
        return
    pool = (budget.needed_blocks * budget.kv.layout.bytes_per_block, "KV cache")
    rest = [(size, word) for word, size in ledger_rows(budget) if word != "KV cache"]
    largest = sorted([pool, *rest], reverse=True)[:3]
    words = ", ".join(f"{word} {format_bytes(size, 'GiB')}" for size, word in largest)
    yield heading("what is missing")
    sizes = (("needed", budget.needed_bytes), ("available", budget.available_bytes))
    yield from packed([*(f"{word} {format_bytes(size, 'GiB')}" for word, size in sizes), "a GPU"])
    yield from wrapped(f"largest: {words}", rest="    ")


def _offers(plan: ServingPlan) -> Iterator[Text | str]:
    if plan.changes:
        yield heading(offers_title(plan))
    width = max((len(change.flag) for change in plan.changes), default=0)
    for change in plan.changes:
        yield from wrapped(change.words, first=f"   {change.flag:<{width}}  ")


def offers_title(plan: ServingPlan) -> str:
    """Return the heading for the changes."""
    if not plan.fits:
        return "what would fit"
    return "what decodes faster" if plan.best.configuration.engine == "llama.cpp" else "what leaves more room"


def lacks(layout: ServingLayout) -> str:
    """Return how much of what a layout lacks, in a few words; empty if it fits."""
    if layout.fits:
        return ""
    demand = max(layout.shortages, key=lambda demand: float(demand.missing_bytes))
    size = format_bytes(round(float(demand.missing_bytes)))
    if demand.while_loading:
        return f"lacks {size} to load"
    return f"lacks {size}" if demand.part == "GPU" else f"its {demand.part} lacks {size}"


def _layouts(plan: ServingPlan) -> Iterator[Text | str]:
    if not plan.others:
        return
    cells: list[tuple[str, ...]] = [("other layouts", "users", "longest context", "tokens/s at most", "")]
    for layout in plan.others[:OTHERS]:
        asked = layout.configuration
        numbers = (layout.most_users, layout.longest_context, round(layout.tokens_per_s))
        why = lacks(layout)
        words = f" tp {asked.tp} pp {asked.pp} × {layout.replicas}"
        cells.append((words, *(f"{number:,}" for number in numbers), why))
    head, *rows = table(cells, align="<>>><", spare=(2,))
    yield Text(head, style="bold")
    yield from rows


def _launch(plan: ServingPlan) -> Iterator[Text | str]:
    if not plan.fits:
        return
    copies = f", {plan.best.replicas} times behind a balancer" if plan.best.replicas > 1 else ""
    hosts = plan.launch.hosts if plan.best.configuration.engine == "vllm" else 1
    yield heading(f"launch{copies}" + (f", with Ray on {hosts} hosts" if hosts > 1 else ""))
    for one in (*(other.plan for other in plan.neighbours), plan):
        if one is not None:
            yield from _command(launch_words(one))
    if hosts > 1:
        yield from said("--export DIR writes what starts Ray on each host, waits for all, then serves", "dim")
    weights, takes_names = plan.best.configuration.weights, ("vllm", "sglang", "tensorrt-llm")
    is_named = plan.best.configuration.engine in takes_names and weights not in ("fp8", plan.shape.dtype)
    if is_named and WEIGHT_FORMATS[weights].quantized:
        yield from said(f"name a checkpoint of this model that is quantised to {weights}", "dim")


def _command(words: list[str]) -> Iterator[str]:
    """Yield the command line, broken before flags if it is long."""
    # The program and, if no flag names it, the model; then flags with their values.
    first = {"python": 3, "trtllm-serve": 2, "llama-server": 1}.get(words[0]) or words.index("serve") + 2
    flags: list[list[str]] = []
    for word in words[first:]:
        if not flags or (word.startswith("-") and not word[1:].isdecimal()):
            flags.append([])
        flags[-1].append(word)
    line = "   " + shlex.join(words[:first])
    for flag in map(shlex.join, flags):
        if len(line) + len(flag) + 3 > report_width():
            yield line + " \\"
            line = "    "
        line += " " + flag
    yield line


def launch_words(plan: ServingPlan) -> list[str]:
    """Return the command that starts it."""
    asked = plan.best.configuration
    if asked.engine == "tonnage":
        # Flags that are not the defaults, and always share and context, so that the same blocks result.
        words = ["tonnage", "serve", hub_id(plan.model)]
        words += ["--budget", f"{asked.utilization:g}", "--context", str(asked.context)]
        usual = ServingConfiguration(max_seqs=MAX_SEQS, batched_tokens=BATCHED_TOKENS)
        for name in ("max_seqs", "batched_tokens", "block"):
            if getattr(asked, name) != getattr(usual, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(asked, name))]
        if asked.weights in ("fp8", "int8") and asked.weights != plan.shape.dtype:
            words += ["--weights", asked.weights]
        return words + ["--kv", "fp8"] * (asked.kv == "fp8") + ["--eager"] * asked.eager
    from tonnage.planner.export import SERVERS, vllm

    launch = plan.launch
    if asked.engine in SERVERS:
        command: list[str] = SERVERS[asked.engine].command(launch)
        return command
    variables = vllm.environment(launch) if asked.stage_layers else []
    environment = ["env", *variables] if variables else []
    return [*environment, "vllm", "serve", vllm.served_model(launch), *vllm.flags(launch)]


def _explained(budget: ServingBudget) -> Iterator[Text | str]:
    """Yield the arithmetic, term by term, and that of the blocks."""
    yield heading("the arithmetic")
    asked, layout = budget.configuration, budget.kv.layout
    share = asked.utilization
    if asked.engine in ("vllm", "tonnage"):
        yield from wrapped(f"share of the card: {budget.capacity_bytes:,} × {share:g} = {budget.limit_bytes:,} B")
    elif asked.engine != "llama.cpp":
        of = "free at start" if asked.engine == "sglang" else "free at the peak, and the peak"
        yield from wrapped(f"share {share:g} of what is {of}: {budget.limit_bytes:,} B of {budget.capacity_bytes:,}")
    for term in budget.terms:
        label = "weights" if term.category is Category.PARAMETERS else term.category.label
        figures = f"{int(term.size_bytes):>18,} B  {cut(term.source, 20)}"
        yield from beside(f"{label}: {term.name}", min(36, report_width() - 2 - len(figures)), figures, rest="    ")
        plain = {name.replace("_", " "): value for name, value in term.numbers.items()}
        numbers = (f"{name} {value:{',' if isinstance(value, int) else ''}}" for name, value in plain.items())
        for words in (f"= {term.formula}", ", ".join(numbers)):
            yield from wrapped(words, first="     ", rest="       ")
    groups = f"{len(layout.groups)} group{'s' * (len(layout.groups) > 1)}"
    yield from wrapped(f"a block: {layout.bytes_per_block:,} B; a token: {layout.bytes_per_token:,} B in {groups}")
    each = layout.sequence_blocks(asked.context, budget.kv.batched_tokens)
    yield from wrapped(f"a sequence of {asked.context:,} tokens: {each:,} blocks")
    blocks = f"{budget.needed_blocks:,} blocks of {budget.kv.blocks:,}"
    yield from wrapped(f"{asked.users:,} of them and the null block: {blocks}")


def serving_figures(plan: ServingPlan) -> dict[str, Any]:
    """Return JSON values with stable keys. Sizes are those of the fullest GPU."""
    best, budget, kv = plan.best, plan.best.budget, plan.best.budget.kv
    asked = best.configuration
    keys = ("parameters", "kv_cache", "activations", "graphs", "workspace", "context")
    figures = {f"{key}_bytes": size for key, (_, size) in zip(keys, ledger_rows(budget), strict=True)}
    found = average_waste(asked.users, -(-asked.context // 2), asked.context, kv.layout.block)
    host: dict[str, Any] = {}
    if isinstance(budget, LlamaBudget):
        names = "layers weights_bytes:weights kv_cache_bytes:cache compute_bytes:compute"
        host = picked(budget, "gpu_layers layers")
        host["host"] = picked(budget.host, names) | {"total_bytes": budget.host.total}
        host["cards"] = [picked(card, names) for card in budget.cards]
    return {
        "tonnage": __version__,
        "fits": plan.fits,
        "model": picked(plan.shape, "name parameters exact"),
        **picked(plan.cluster, "gpu:gpu.name gpus"),
        **picked(budget, "capacity_bytes needed_bytes available_bytes"),
        "config": picked(asked, _CONFIGURATION) | {"users": plan.users, "replicas": best.replicas},
        "ledger": figures | {"total_bytes": budget.total_bytes},
        "shortages": shortage_figures(plan.shortages),
        "loading": loading_figures(best.loading, plan.cluster, plan.shortages),
        "kv": {
            **picked(kv.layout, "bytes_per_token bytes_per_block block"),
            "groups": len(kv.layout.groups),
            **picked(kv, "available_bytes blocks tokens"),
            "max_concurrency": kv.max_concurrency(asked.context),
            **picked(budget, "needed_blocks"),
            **picked(found, "contiguous_waste:contiguous_share paged_waste:paged_share"),
        },
        **picked(best, "most_users longest_context"),
        "decode": picked(best, "step_s:decode_step_s tokens_per_s"),
        "changes": [picked(change, "flag users context") for change in plan.changes],
        "alternatives": [picked(layout, _ALTERNATIVE) for layout in plan.others],
        "terms": [
            picked(t, "category name size_bytes formula numbers source")
            | {"size_bytes": int(t.size_bytes), "numbers": dict(t.numbers)}
            for t in budget.terms
        ],
        "launch": launch_words(plan),
        "beside": [
            picked(each, "words claimed_bytes share")
            | {"most_users": _most_users(each.plan) if each.plan is not None else None}
            | {"launch": launch_words(each.plan) if each.plan is not None else []}
            for each in plan.neighbours
        ],
        "notes": list(budget.notes),
        "users_per_replica": asked.users,
        **host,
    }
