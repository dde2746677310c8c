"""What took the room on the card: the largest users, a limit of the process, memory outside PyTorch, fragmentation.

A process may limit itself (`set_per_process_memory_fraction`), and then memory is refused that the card still has.
Outside PyTorch's allocator is this process's memory (NCCL, libraries) and that of others; a context and libraries are
expected and small, and the rule is about what exceeds that. A run failed of fragmentation if its request would have
fitted had all reserved, unused memory been one piece. For a run that completed, only large amounts are reported:
healthy runs reserve up to 1.58 times what they allocate.
"""

from bisect import bisect_right
from dataclasses import dataclass

from tonnage.allocator import AllocatorSettings
from tonnage.explain.case import OWN_LIMIT, Case, is_limited_by_itself
from tonnage.explain.fixes import Finding, Fix, Guilty, allocator_fix, guilty_lines, lines_words
from tonnage.ledger import Category, Ledger
from tonnage.recording import Allocation, Recording
from tonnage.recording.holes import segments_at
from tonnage.units import GIB, MIB, format_bytes

_EXPECTED_BYTES = GIB
_OTHERS = ("other process", "other processes")
_FATAL_SHARE = 0.1
_LARGE_SHARE = 0.4
_LARGE_BYTES = 128 * MIB
_LINES = 5
_CONFIGURATIONS = (
    "expandable_segments:True",
    "max_split_size_mb:256",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:128",
)


def capacity(case: Case) -> Finding | None:
    """Return the largest categories and lines at the decisive moment."""
    if not case.live:
        return None
    ledger, lines = Ledger.of((a.category, a.block_bytes) for a in case.live), guilty_lines(case.live)
    total, (category, size_bytes) = ledger.total_bytes, next(ledger.ranked())
    # Older blocks have no lines: if they dominate, no line is named.
    known = [a for a in case.live if a.line and category in (a.category, Category.EARLIER)]
    is_most = category is Category.EARLIER or 2 * sum(a.block_bytes for a in known) > size_bytes
    where = lines_words(guilty_lines(known)) if is_most else ""
    size, most = format_bytes(size_bytes), "most"
    if category is Category.EARLIER:
        words, most = f"{size} of it are older than the recording", "most of the rest"
    elif category is Category.OTHER:
        words = f"what {size} of it are for is not known"
    else:
        words = f"{category.label} are {size} of it"
    words += f", {most}{where}" if where else ""
    if case.death is None:
        return Finding("peak", f"{format_bytes(total)} at the peak; {words}", total, lines=lines)
    sentence = f"{format_bytes(total)} were needed when it died; {words}"
    return Finding("capacity", sentence, total, "capacity", lines=lines)


def own_limit(case: Case) -> Finding | None:
    """Return the process's own limit, if the failed request met it before the card's."""
    death = case.death
    if death is None or not is_limited_by_itself(case.recording):
        return None
    noted = next((note for note in case.recording.notes if note.operator == OWN_LIMIT), None)
    limit = death.reserved_bytes + death.free_bytes
    beyond = noted.text.partition("; ")[2] if noted else f"the device had {format_bytes(death.device_free_bytes)} free"
    sentence = f"a limit that the process set itself allows {format_bytes(limit)}; {beyond}"
    how = "a larger torch.cuda.set_per_process_memory_fraction(), or none"
    return Finding("own-limit", sentence, limit, fixes=(Fix("a higher limit", 0, "nothing", how, True),))


def outside_pytorch(case: Case) -> Finding | None:
    """Return what this process holds outside the allocator, if it exceeds a context and its libraries."""
    # The recorded parts; if PyTorch's message says that there is more, the rest as one part.
    header, death = case.recording.header, case.death
    parts = {part: size for part, size in header.overhead_parts.items() if part not in _OTHERS}
    if not parts and header.overhead_bytes:
        parts = {"context and libraries": header.overhead_bytes}
    if death and death.process_bytes is not None:
        rest = death.process_bytes - death.reserved_bytes - sum(parts.values())
        if rest > 16 * MIB:
            parts["other allocations"] = rest
    held = sum(parts.values())
    if held <= _EXPECTED_BYTES:
        return None
    largest = max(parts, key=parts.__getitem__)
    named = ", ".join(f"{part} {format_bytes(size)}" for part, size in sorted(parts.items(), key=lambda p: -p[1])[:3])
    sentence = f"this process holds {format_bytes(held)} on the card outside PyTorch's allocator ({named})"
    costs, how = "unknown", f"free or bound what {largest} holds"
    if "nccl" in largest.lower():
        costs, how = "slower collectives", "fewer process groups; NCCL_MAX_NCHANNELS=8 or NCCL_BUFFSIZE=1048576"
    fix = Fix("less outside PyTorch", held - _EXPECTED_BYTES, costs, how)
    return Finding("outside", sentence, held, "outside", held - _EXPECTED_BYTES, (), (fix,))


def another_process(case: Case) -> Finding | None:
    """Return what other processes hold on the card, from PyTorch's message or as recorded."""
    parts = case.recording.header.overhead_parts
    held = max(case.death.other_process_bytes if case.death else 0, sum(parts.get(name, 0) for name in _OTHERS))
    if held <= _EXPECTED_BYTES:
        return None
    sentence = f"other processes hold {format_bytes(held)} on this card"
    fix = Fix("the card to itself", held, "nothing", "find them with nvidia-smi; CUDA_VISIBLE_DEVICES=another card")
    return Finding("other-process", sentence, held, "other-process", held, (), (fix,))


@dataclass(frozen=True, slots=True)
class Holes:
    """A segment that is not full: its free bytes, the largest hole, and the blocks that pin it."""

    free_bytes: int
    largest_bytes: int
    blocks: tuple[Allocation, ...]
    is_empty: bool = False


def fragmentation(case: Case) -> Finding | None:
    """Return the unused bytes, the largest hole, the lines whose blocks pin them, and the setting that helps."""
    # Unused bytes count if they caused the failure or are large.
    death, moment = case.death, None
    if death:
        reserved, unused = death.reserved_bytes, death.unused_bytes
        if death.requested_bytes <= death.free_bytes + unused and unused >= _FATAL_SHARE * reserved:
            moment = case.moment
    elif reserved := case.recording.own_peak_reserved_bytes:
        timeline = case.recording.timeline
        moment = timeline.best_used(reserved, since=case.recording.begins_at)
        unused = 0 if moment is None else reserved - timeline.allocated_bytes[moment]
        if unused < max(_LARGE_SHARE * reserved, _LARGE_BYTES):
            return None
    if moment is None:
        return None
    segments = holes_at(case.recording, moment)
    hole = max((holes.largest_bytes for holes in segments), default=0)
    # The lines whose blocks pin segments; a segment's free bytes are shared by all its blocks.
    room: dict[tuple[str, bool], float] = {}
    count: dict[tuple[str, bool], int] = {}
    for holes in segments:
        for block in holes.blocks:
            key = (block.line, holes.is_empty)
            room[key] = room.get(key, 0) + holes.free_bytes / len(holes.blocks)
            count[key] = count.get(key, 0) + 1
    ranked = sorted(room, key=lambda key: -room[key])[:_LINES]
    words = {True: "taken for it, and empty now", False: "free beside its blocks"}
    lines = tuple(Guilty(key[0], round(room[key]), count[key], words[key[1]]) for key in ranked)
    pieces = f"{format_bytes(unused)} of the {format_bytes(reserved)} reserved lay unused in pieces"
    because = f", because of blocks made{where}" if (where := lines_words(lines)) else ""
    largest = f"the largest hole {format_bytes(hole)}{because}" if hole else ""
    asked = f" when {format_bytes(death.requested_bytes)} was asked for" if death else ""
    sentence = ", ".join(filter(None, [f"{pieces}{asked}", largest]))
    # The first allocator setting that helps, tested by replay.
    present = case.recording.header.settings
    useless = ("max_split",) if AllocatorSettings.parse(present).expandable_segments else ()
    untried = (each for each in _CONFIGURATIONS if each.split(":")[0] not in present and not each.startswith(useless))
    fix = next(filter(None, (allocator_fix(case.recording, configuration) for configuration in untried)), None)
    return Finding("fragmentation", sentence, unused, "fragmentation", unused, lines, (fix,) if fix else ())


def holes_at(recording: Recording, moment: int) -> list[Holes]:
    """Return the segments with holes after an event, most free bytes first."""
    segments = segments_at(recording, moment)
    starts = [segment.address for segment in segments]
    inside: dict[int, list[Allocation]] = {start: [] for start in starts}
    for a in recording.live_at(moment):
        place = bisect_right(starts, a.address) - 1
        if place >= 0:
            inside[starts[place]].append(a)
    # The largest initial block of each empty segment, for which it was reserved.
    first: dict[int, Allocation] = {}
    for a in recording.allocations:
        if not inside.get(a.address, [a]) and a.born <= moment:
            first[a.address] = max(first.get(a.address, a), a, key=lambda block: block.block_bytes)
    found = []
    for s in segments:
        blocks = inside[s.address] or [block for block in [first.get(s.address)] if block]
        if s.unused_bytes:
            found.append(Holes(s.unused_bytes, s.largest_hole_bytes, tuple(blocks), not inside[s.address]))
    return sorted(found, key=lambda holes: -holes.free_bytes)
