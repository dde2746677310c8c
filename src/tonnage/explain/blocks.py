"""The repeated blocks of a model, and what they would keep if each were recomputed in backward.

A block is a numbered module that keeps more than its output. If the outermost ones are stages of different sizes, as in
most vision models, the blocks are the numbered modules inside them. If a library marks the layers it can recompute,
those are used.
"""

import re
from bisect import bisect_right
from dataclasses import replace

from tonnage.explain.rewriting import Rewrite, spans_of
from tonnage.explain.words import checkpoint_words
from tonnage.ledger import Category
from tonnage.recording import Allocation, Recording, module_pattern
from tonnage.techniques import change_of

# Matches a path up to each of its numbers: "layers.7" and "layers.7.experts.3" of "layers.7.experts.3.up".
_NUMBERED = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
_TINY_SHARE = 1 / 64  # of a block's largest tensor: norm statistics, RNG states
_COVERED_SHARE = 0.5
_STAGES_DIFFER = 1.5
_PREFIXES = 4
_Made = dict[tuple[int, str], list[Allocation]]  # by forward pass and the block that made them


def checkpoint_blocks(recording: Recording) -> Rewrite | None:
    """Recompute each repeated block in backward: only its output is kept until its backward runs."""
    ends = [end for _, end in spans_of(recording, "forward")]
    parts: dict[int, list[Allocation]] = {}
    blocks: set[str] = set()
    for (number, block), made in _made_by_block(recording).items():
        saved = [a for a in made if a.died is None or a.died >= ends[number]]
        if _is_whole(block, saved):
            blocks.add(block)
            # Beside a huge index or mask nothing else may count: then the last saved tensor is the output.
            parts |= _recomputed(saved, (_large(made) or _large(saved))[-1])
    if len(blocks) < 2:
        return None
    changed = [part for a in recording.allocations for part in parts.get(a.index, [a])]
    return Rewrite(*change_of("recompute", count=len(blocks)), checkpoint_words(recording, _names(blocks)), changed)


def _recomputed(saved: list[Allocation], output: Allocation) -> dict[int, list[Allocation]]:
    """Give saved tensors two lives: in the block's forward, and from its backward on. The output lives until then."""
    again = min((a.died for a in saved if a.died is not None), default=None)
    parts = {}
    for a in saved:
        parts[a.index] = [replace(a, died=output.born + 1)] if a.born <= output.born else []
        if again is not None and a.died is not None and a.died > again:
            parts[a.index].append(replace(a, born=again))
    parts[output.index] = [output]
    if output.died is not None and (again is None or output.died < again):
        parts[output.index] = [replace(output, died=again)]
    return parts


def _is_whole(block: str, members: list[Allocation]) -> bool:
    """Say whether it has submodules and keeps several tensors: a single layer, however often called, is no block."""
    if not members or all(a.module == block for a in members):
        return False
    return len({(a.module, a.operator) for a in _large(members)}) > 1


def _large(members: list[Allocation]) -> list[Allocation]:
    """Return the tensors that count, in order; masks and indices are not outputs."""
    least = _TINY_SHARE * max(a.block_bytes for a in members)
    return [a for a in members if a.block_bytes >= least and (not a.dtype or "float" in a.dtype)]


def _made_by_block(recording: Recording) -> _Made:
    """Return activations of each forward pass, by the block that made them."""
    starts = [start for start, _ in spans_of(recording, "forward")]
    kept: list[tuple[int, Allocation]] = []
    for a in recording.allocations:
        number = bisect_right(starts, a.born) - 1
        if a.category is Category.ACTIVATIONS and a.phase == "forward" and number >= 0:
            kept.append((number, a))
    found: _Made = {}
    if named := recording.header.training.get("recomputed", ""):
        # Group by the layers that the model's library can recompute, using the outermost if they are nested.
        own = set(named.split("\n"))
        for number, a in kept:
            path = a.module.split(".")
            heads = (".".join(path[:length]) for length in range(1, len(path) + 1))
            if block := next((head for head in heads if head in own), None):
                found.setdefault((number, block), []).append(a)
        return found
    outer = _at_depth(kept, 0)
    sizes = {sum(a.block_bytes for a in members) for members in outer.values()}
    if not sizes or max(sizes) < _STAGES_DIFFER * min(sizes):
        return outer
    # Split up stages that consist of whole blocks.
    for key, members in outer.items():
        inner = _at_depth([(key[0], a) for a in members], 1)
        whole = {key: blocks for key, blocks in inner.items() if _is_whole(key[1], blocks)}
        covered = sum(a.block_bytes for blocks in whole.values() for a in blocks)
        is_stage = len(whole) > 1 and covered >= _COVERED_SHARE * sum(a.block_bytes for a in members)
        found |= whole if is_stage else {key: members}
    return found


def _at_depth(kept: list[tuple[int, Allocation]], depth: int) -> _Made:
    """Group by the path up to the first or the second number."""
    found: _Made = {}
    for number, a in kept:
        places = list(_NUMBERED.finditer(a.module))
        if len(places) > depth:
            found.setdefault((number, a.module[: places[depth].end()]), []).append(a)
    return found


def _names(blocks: set[str]) -> str:
    """Format the block lists like "layer1.*, layer2.* and layer3.*", or the first few."""

    def in_order(block: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in block.split(".")]

    patterns = list(dict.fromkeys(map(module_pattern, sorted(blocks, key=in_order))))
    # Several stages may share a pattern, as in "stages.*.blocks.*"; an uninformative one is left out.
    if len(patterns) == 1:
        return "block" if patterns == ["*"] else patterns[0]
    shown, rest = patterns[:_PREFIXES], len(patterns[_PREFIXES:])
    last = f"{rest} more" if rest else shown.pop()
    return f"{', '.join(shown)} and {last}"
