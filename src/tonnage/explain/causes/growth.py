"""Memory that grows: what loop iterations leave behind and the line that keeps it, and KV caches.

What one iteration allocates and is still alive two iterations later was kept. A line that does this repeatedly leaks;
one whose older blocks are freed as new ones come (a buffer of fixed length) does not. Blocks freed many iterations at
once wait for the garbage collector in a reference cycle. Parameters and optimizer states are meant to stay.

Only iterations that do the same work are compared: loading a model is none, one call of `generate` is one, and what a
run kept in a few early iterations and never again (a survey, a warm-up) does not grow.

Caches that grow by concatenation allocate a longer block and free the previous one, so nothing is kept twice; the sizes
show it. A cache kept as a list is concatenated at every token, and that block grows by what was kept.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tonnage.explain.case import Case
from tonnage.explain.fixes import Cause, Finding, Fix, Guilty, finding, fix_of, guilty_lines
from tonnage.explain.rewriting import Rewrite, resized
from tonnage.explain.source import KeepingStatement, Source
from tonnage.explain.words import trains
from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.recording.loops import ENOUGH
from tonnage.recording.timeline import spans
from tonnage.units import KIB, format_bytes

_MEANT_TO_STAY = (Category.PARAMETERS, Category.OPTIMIZER_STATES)
_LEAST_TURNS = 2
_PER_TURN_BYTES = 64 * KIB
_BOUNDED_SHARE = 0.1
_WORTH_SHARE = 0.05
_GRAPH_SHARE = 0.5
_GRAPH_BLOCKS = 10
_MOST_SHARE = 0.75

_Key = tuple[str, str, str, Category]  # line, operator, module
_QUARTERS = 4
_MUCH_SHARE = 0.5
_FATAL_SHARE = 0.25
_BOUND_SHARE = 0.5
# A run that completed grows if a line left something behind in as many iterations, the last of them recently: within
# this many times the longest gap between two of them.
_ENOUGH_KEPT, _RECENT_GAPS = 3, 2
_JOINS = ("cat", "stack")
_GROWN_SHARE = 0.5
_AT_ONCE = 2  # layers whose cache is on the GPU while the others' is on the host
_HOW = "a static or sliding-window cache of half the length reached"


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Blocks left behind by iterations, the number of these, and whether the garbage collector frees them eventually.

    `overdue` has the indices of all blocks that lived too long, including those collected meanwhile.
    """

    blocks: list[Allocation]
    overdue: set[int]
    turns: int
    in_cycle: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of all these blocks."""
        return _size(self.blocks)


def leak(case: Case) -> Finding | None:
    """Return what is kept, by which line, and what freeing it in time saves."""
    kept = kept_blocks(case)
    if kept is None or kept.size_bytes < kept.turns * _PER_TURN_BYTES:
        return None
    if kept.in_cycle and kept.size_bytes < _WORTH_SHARE * case.peak_bytes:
        return None
    keeper, lines = _keeper(case, kept), guilty_lines(kept.blocks)
    if keeper:
        lines = (Guilty(keeper.line, kept.size_bytes, len(kept.blocks), f"keeps it: {keeper.text}"), *lines)
    # What is left behind, and by which line.
    size, each = kept.size_bytes, format_bytes(kept.size_bytes // kept.turns)
    made = f"every turn of the loop leaves {each} behind, {format_bytes(size)} after {kept.turns} turns"
    if kept.turns == 1:
        made = f"the turn before left {each} behind"
    if kept.in_cycle:
        held = f"what {lines[0].line} makes hangs in a reference cycle, or in a list that is emptied late"
        sentence = f"{made}, until those of many turns are freed together: {held}"
    else:
        sentence = f"{made}: {_holder(case, kept, keeper, lines)}"
    cause: Cause = "unbounded-cache" if _is_cache(case, kept) else "leak"
    fix = _fix(case, kept, keeper)
    return Finding(cause, sentence, size, cause, size, lines, (fix,) if fix else ())


def kept_blocks(case: Case) -> LeftBehind | None:
    """Return the blocks left behind at the decisive moment, or at the last request if there are more."""
    turns = case.comparable_turns
    if len(turns) < (ENOUGH - 1 if case.death else ENOUGH):
        return None
    last = case.moment if case.death else max(a.born for a in case.recording.allocations)
    starts = [start for start in turns if start <= last]
    overdue: list[Allocation] = []
    # Blocks still alive two iterations later, with their iteration, by what made them.
    edges = [*starts, last]
    found: dict[_Key, list[tuple[int, Allocation]]] = {}
    for a in case.recording.allocations:
        turn = bisect_right(edges, a.born) - 1
        if not 0 <= turn < len(edges) - 2 or a.category in _MEANT_TO_STAY:
            continue
        if a.died is None or a.died > edges[turn + 2]:
            # A batch counts as an input once it is used: prefetched ones belong to the same kind.
            category = Category.OTHER if a.category is Category.INPUTS else a.category
            found.setdefault((a.line, a.operator, a.module, category), []).append((turn, a))
    for members in found.values():
        # They accumulate iteration after iteration, or are freed many iterations at once.
        dead = [(turn, bisect_right(starts, a.died)) for turn, a in members if a.died is not None and a.died <= last]
        together = bool(dead) and len({turn for turn, _ in dead}) >= ENOUGH * len({end for _, end in dead})
        leaks = together or len(dead) <= _BOUNDED_SHARE * len(members)
        kept_in = sorted({turn for turn, _ in members})
        if not leaks or len(kept_in) < _LEAST_TURNS:
            continue
        if case.death is None and not together and not _goes_on(kept_in, last_judged=len(edges) - 3):
            continue
        overdue += [a for _, a in members]
    alive = max((_alive(overdue, moment) for moment in (last, case.moment)), key=_size)
    kept_turns = len({bisect_right(starts, a.born) for a in alive})
    if kept_turns >= _LEAST_TURNS:
        in_cycle = 2 * len(_alive(overdue, last)) < len(overdue)
        return LeftBehind(alive, {a.index for a in overdue}, kept_turns, in_cycle)
    return _graph_of_last_turn(case) if case.death else None


def _goes_on(kept_in: list[int], last_judged: int) -> bool:
    """Say whether iterations with these numbers show that the next ones leave something behind too.

    `last_judged` is the last iteration whose blocks could be overdue: what the two after it made may still be freed.
    """
    if len(kept_in) < _ENOUGH_KEPT:
        return False
    longest_gap = max(later - earlier for earlier, later in pairwise(kept_in))
    return last_judged - kept_in[-1] <= _RECENT_GAPS * longest_gap


def _alive(blocks: list[Allocation], moment: int) -> list[Allocation]:
    return [a for a in blocks if a.born <= moment and (a.died is None or a.died > moment)]


def _size(blocks: list[Allocation]) -> int:
    return sum(a.block_bytes for a in blocks)


def _graph_of_last_turn(case: Case) -> LeftBehind | None:
    """Return the first iteration's saved tensors if the run failed in the second while most were still alive."""
    starts = [start for start in case.comparable_turns if start <= case.moment]
    if len(starts) < 2:
        return None
    begin, end = starts[-2:]
    backwards = (m.sequence for m in case.recording.marks if m.name == "backward" and begin < m.sequence < end)
    backward = next(backwards, end)
    made = [a for a in case.recording.allocations if begin <= a.born < backward and _is_forward(a)]
    saved = [a for a in made if a.died is None or a.died > backward]
    kept = [a for a in saved if a.died is None or a.died > case.moment]
    if len(kept) < _GRAPH_BLOCKS or _size(kept) < _GRAPH_SHARE * _size(saved) or backward == end:
        return None
    return LeftBehind(kept, {a.index for a in kept}, 1, in_cycle=False)


def _is_forward(a: Allocation) -> bool:
    return a.category is Category.ACTIVATIONS and a.phase == "forward"


def _is_cache(case: Case, kept: LeftBehind) -> bool:
    """Say whether most of it is a KV cache, by category, or because it is concatenated to a longer block at every token."""
    if _size([a for a in kept.blocks if a.category is Category.KV_CACHE]) > kept.size_bytes / 2:
        return True
    # In a training, losses or replayed data may be concatenated too.
    return not trains(case.recording) and _grows_by_joining(case, kept)


def _grows_by_joining(case: Case, kept: LeftBehind) -> bool:
    """Say whether concatenations became longer from iteration to iteration, by half of what was kept or more."""
    turns = case.comparable_turns
    largest: dict[tuple[str, str], dict[int, int]] = {}
    for a in case.recording.allocations:
        if a.operator.removeprefix("aten::") in _JOINS:
            by_turn = largest.setdefault((a.line, a.module), {})
            turn = bisect_right(turns, a.born)
            by_turn[turn] = max(by_turn.get(turn, 0), a.requested_bytes)
    kept_in = {bisect_right(turns, a.born) for a in kept.blocks}
    grown = 0
    for by_turn in largest.values():
        sizes = [by_turn[turn] for turn in sorted(by_turn) if turn in kept_in]
        if len(sizes) >= _ENOUGH_KEPT and all(before < after for before, after in pairwise(sizes)):
            grown += sizes[-1] - sizes[0]
    later = _size([a for a in kept.blocks if bisect_right(turns, a.born) > min(kept_in)])
    return grown > 0 and grown >= _GROWN_SHARE * later


def _keeps_graph(kept: LeftBehind) -> bool:
    """Say whether most of it is forward activations, which backward would have freed."""
    graph = [a for a in kept.blocks if _is_forward(a)]
    return len(graph) > 2 * kept.turns and _size(graph) >= _GRAPH_SHARE * kept.size_bytes


def _keeper(case: Case, kept: LeftBehind) -> KeepingStatement | None:
    """Return the statement that keeps it, if the script's source is available."""
    source = None if kept.in_cycle else Source.find(case.recording.header.script)
    if source is None:
        return None
    # The names that hold it: the loss of a kept graph, else what its lines assign.
    keeps_graph = _keeps_graph(kept)
    lines = (a.line for a in case.recording.allocations if a.phase == "backward" and keeps_graph)
    followed = [*map(source.names_backward_runs_on, _numbers(lines, source))]
    followed += map(source.names_made_on, _numbers(_lines_of(kept), source))
    for names in followed:
        if keeper := source.keeper_of(names, of_graph=keeps_graph):
            return keeper
    for line in _lines_of(kept):
        file, _, number = line.rpartition(":")
        if file == source.name and number.isdigit() and (keeper := source.keeper_on(int(number))):
            return keeper
    return source.keeping_hook()


def _numbers(lines: Iterator[str], source: Source) -> list[int]:
    named = [line.rpartition(":") for line, _ in Counter(lines).most_common(8)]
    return [int(number) for file, _, number in named if file == source.name and number.isdigit()]


def _lines_of(kept: LeftBehind) -> Iterator[str]:
    """Yield the lines of the kept blocks and of their callers."""
    return (line for a in kept.blocks for line in (a.line, *a.stack) if line)


def kept_words(case: Case, kept: LeftBehind) -> str:
    """Say which line keeps what, like "train.py:31 keeps a graph that backward would have freed"."""
    return _holder(case, kept, _keeper(case, kept), guilty_lines(kept.blocks))


def _holder(case: Case, kept: LeftBehind, keeper: KeepingStatement | None, lines: tuple[Guilty, ...]) -> str:
    what = "what it made"
    if _is_cache(case, kept):
        what = "a cache that grows with the sequence"
    elif _keeps_graph(kept):
        what = "a graph that backward would have freed"
    if keeper:
        return f"{'the hook at ' if keeper.is_hook else ''}{keeper.line} keeps {what}"
    # The innermost line under which most kept bytes were allocated, if stacks are known.
    below, common = kept.blocks, ""
    for depth in range(max((len(a.stack) for a in below), default=0)):
        frames: dict[str, list[Allocation]] = {}
        for a in below:
            if len(a.stack) > depth:
                frames.setdefault(a.stack[-1 - depth], []).append(a)
        largest = max(frames, key=lambda frame: _size(frames[frame]), default="")
        if not largest or _size(frames[largest]) < _MOST_SHARE * kept.size_bytes:
            break
        below, common = frames[largest], largest
    return f"{what} is kept, made at {common or lines[0].line or 'a line that is not known'}"


def _fix(case: Case, kept: LeftBehind, keeper: KeepingStatement | None) -> Fix | None:
    """Return the fix: each block freed in time, by backward if backward uses it, else with its iteration."""
    if case.recording.whole is not None:  # what it left behind after the failure counts too
        case = Case(case.needed)
        kept = kept_blocks(case) or kept
    due = _due(case, kept)
    freed = [replace(a, died=due[a.index]) if a.index in due else a for a in case.needed.allocations]
    where = f" at {keeper.line}" if keeper else ""
    if kept.in_cycle:
        how = "break the cycle (weakref), or gc.collect() after each step"
    elif _is_cache(case, kept):
        how = f"give the cache a length{where}"
    elif _keeps_graph(kept):
        how = f"keep loss.detach() or loss.item(), not the loss{where}"
    else:
        how = f"keep it on the host (.cpu()), or drop it after use{where}"
    return fix_of(case.needed, Rewrite("keep nothing across steps", "nothing", how, freed))


def _due(case: Case, kept: LeftBehind) -> dict[int, int]:
    """Return by block when the next iteration begins, or when backward would free a graph: in reverse order of allocation."""
    turns = case.comparable_turns
    ends = {a.index: bisect_right(turns, a.born) for a in case.needed.allocations if a.index in kept.overdue}
    due = {index: turns[end] for index, end in ends.items() if end < len(turns)}
    if not _keeps_graph(kept):
        return due
    makers = {(a.line, a.operator, a.module) for a in kept.blocks if a.phase == "forward"}
    phases = list(spans(case.recording.marks, "phase", len(case.recording.timeline.allocated_bytes)))
    passes = [(f[1], b[1], b[2]) for f, b in pairwise(phases) if (f[0], b[0]) == ("forward", "backward")]
    begins = [start for start, _, _ in passes]
    for a in case.needed.allocations:
        place = bisect_right(begins, a.born) - 1
        if place < 0 or (a.line, a.operator, a.module) not in makers:
            continue
        start, middle, end = passes[place]
        if a.born < middle and (a.died is None or a.died > end):
            due[a.index] = middle + (middle - a.born) * (end - middle) // (middle - start)
    return due


def unbounded_cache(case: Case) -> Finding | None:
    """Return the cache at the decisive moment, if it is large and has grown at every iteration."""
    cached = [a for a in case.live if _is_cached(a)]
    size = sum(a.block_bytes for a in cached)
    if size < (_FATAL_SHARE if case.death else _MUCH_SHARE) * case.peak_bytes:
        return None
    if sum(a.block_bytes for a in cached if a.phase == "generation") > size / 2:
        return None  # it is bounded by max_new_tokens
    # The cached bytes at the start of each iteration.
    starts = [start for start in case.turns if start <= case.moment]
    changes = [0] * (len(starts) + 1)
    for a in case.recording.allocations:
        if _is_cached(a):
            changes[bisect_right(starts, a.born - 1)] += a.block_bytes
            if a.died is not None and a.died <= case.moment:
                changes[bisect_right(starts, a.died - 1)] -= a.block_bytes
    levels = [level for level in accumulate(changes[:-1]) if level]
    # Levels rise in each quarter and never fall; rounding may make neighbours equal.
    quarters = [levels[(len(levels) - 1) * part // _QUARTERS] for part in range(_QUARTERS + 1) if levels]
    rises = all(before < after for before, after in pairwise(quarters))
    if len(levels) < _QUARTERS or not rises or levels != sorted(levels):
        return None
    each = (levels[-1] - levels[0]) // (len(levels) - 1)
    words = f"the KV cache holds {{size}} and grew by {format_bytes(each)} at every step"
    rewrite = _bounded(case, "bound the KV cache", "what lies further back", _HOW)
    return replace(finding(case, "unbounded-cache", words, cached, rewrite, cause="unbounded-cache"), waste_bytes=size)


def growing_generation(case: Case) -> Finding | None:
    """Return the cache of `generate` at its largest, its length, and its bytes per token up to `max_new_tokens`."""
    cached = [a for a in case.live_in(("generation",)) if a.category is Category.KV_CACHE]
    longest = max((a.shape for a in cached if a.shape and len(a.shape) == 4), key=lambda s: s[2], default=None)
    if not case.is_worth(cached) or longest is None or not longest[2]:
        return None
    sequences, tokens = longest[0], longest[2]
    each = format_bytes(sum(a.block_bytes for a in cached) // tokens)
    held = f"the KV cache of generate() holds {{size}} at {tokens:,} tokens of {sequences:,} sequences"
    words = f"{held}, {each} for each more of max_new_tokens"
    layers = max(1, len(cached) // 2)
    offloaded = resized(case.needed, lambda a: min(1.0, _AT_ONCE / layers) if _is_cached(a) else 1.0)
    how = 'generate(..., cache_implementation="offloaded")'
    offload = Rewrite("KV cache on the host", "copies at every token", how, offloaded)
    half = _bounded(case, "half the length", "half the tokens", "half of max_new_tokens, or of the sequences")
    return finding(case, "generation-cache", words, cached, offload, half, cause="generation")


def _is_cached(a: Allocation) -> bool:
    """Say whether a block belongs to a KV cache, or is concatenated like one."""
    joined = a.operator.removeprefix("aten::") == "cat" and a.phase in ("forward", "generation")
    return a.category is Category.KV_CACHE or (joined and a.category is Category.ACTIVATIONS)


def _bounded(case: Case, change: str, costs: str, how: str) -> Rewrite:
    """Return the run with a cache of half the length it reached."""
    longest = max((a.block_bytes for a in case.needed.allocations if _is_cached(a)), default=0)
    bound = int(_BOUND_SHARE * longest)
    smaller = resized(case.needed, lambda a: min(1.0, bound / a.block_bytes) if _is_cached(a) and bound else 1.0)
    return Rewrite(change, costs, how, smaller)
