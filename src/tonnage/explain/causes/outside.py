"""Memory on the card outside PyTorch's allocator: this process's (context, libraries, NCCL) and that of others.

A context and libraries are expected and small; the rule is about what exceeds that.
"""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding
from tonnage.explain.fixes import Fix
from tonnage.units import GIB, MIB, format_bytes

_EXPECTED_BYTES = GIB
_OTHERS = ("other process", "other processes")
_NCCL_HOW = "fewer process groups; NCCL_MAX_NCHANNELS=8 or NCCL_BUFFSIZE=1048576"


def outside_pytorch(case: Case) -> Finding | None:
    """Return what this process holds outside the allocator, if it exceeds a context and its libraries."""
    parts = _own_parts(case)
    held = sum(parts.values())
    if held <= _EXPECTED_BYTES:
        return None
    largest = max(parts, key=parts.__getitem__)
    named = ", ".join(f"{part} {format_bytes(size)}" for part, size in sorted(parts.items(), key=lambda p: -p[1])[:3])
    sentence = f"this process holds {format_bytes(held)} on the card outside PyTorch's allocator ({named})"
    how = _NCCL_HOW if "nccl" in largest.lower() else f"free or bound what {largest} holds"
    fix = Fix(
        "less outside PyTorch", held - _EXPECTED_BYTES, "slower collectives" if how is _NCCL_HOW else "unknown", how
    )
    return Finding("outside", sentence, held, "outside", held - _EXPECTED_BYTES, (), (fix,))


def _own_parts(case: Case) -> dict[str, int]:
    """Return the recorded parts; if PyTorch's message says that there is more, the rest as one part."""
    header, death = case.recording.header, case.death
    parts = {part: size for part, size in header.overhead_parts.items() if part not in _OTHERS}
    if not parts and header.overhead_bytes:
        parts = {"context and libraries": header.overhead_bytes}
    if death and death.process_bytes is not None:
        rest = death.process_bytes - death.reserved_bytes - sum(parts.values())
        if rest > 16 * MIB:
            parts["other allocations"] = rest
    return parts


def another_process(case: Case) -> Finding | None:
    """Return what other processes hold on the card, from PyTorch's message or as recorded."""
    parts = case.recording.header.overhead_parts
    held = max(case.death.other_process_bytes if case.death else 0, sum(parts.get(name, 0) for name in _OTHERS))
    if held <= _EXPECTED_BYTES:
        return None
    sentence = f"other processes hold {format_bytes(held)} on this card"
    fix = Fix("the card to itself", held, "nothing", "find them with nvidia-smi; CUDA_VISIBLE_DEVICES=another card")
    return Finding("other-process", sentence, held, "other-process", held, (), (fix,))
