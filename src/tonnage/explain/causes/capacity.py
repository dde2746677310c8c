"""The largest memory users at the failure or the peak, whatever the cause, and what else took room on the card.

That is a limit set by the process itself (`set_per_process_memory_fraction`), which refused memory that the card still
had, and memory outside PyTorch's allocator: this process's (NCCL, libraries) and that of others. A context and
libraries are expected and small; the rule is about what exceeds that.
"""

from tonnage.explain.case import OWN_LIMIT, Case, is_limited_by_itself
from tonnage.explain.fixes import Finding, Fix, guilty_lines, lines_words
from tonnage.ledger import Category, Ledger
from tonnage.units import GIB, MIB, format_bytes

_EXPECTED_BYTES = GIB
_OTHERS = ("other process", "other processes")


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
