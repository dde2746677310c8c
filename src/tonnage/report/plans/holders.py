"""Which GPUs hold a model, as text and as JSON values: one row each, by memory, the smallest that holds it marked."""

from collections.abc import Iterator
from typing import Any

from tonnage import __version__
from tonnage.models.shape import ModelShape
from tonnage.planner.holders import Holder, smallest
from tonnage.report.lines import picked, table, wrapped
from tonnage.units import GIB


def holder_lines(shape: ModelShape, holders: list[Holder], *, what: str, most: str) -> Iterator[str]:
    """Yield the table. `what` is planned, like "training at 4,096 tokens"; `most` is the heading of the last column."""
    yield ""
    yield from wrapped(f"{shape.name}, {shape.parameters / 1e9:,.2f} B · {what} · which cards hold it")
    yield ""
    least, holding = smallest(holders), [holder for holder in holders if holder.most]
    offload = "offload" * any(holder.offload for holder in holding)
    rows: list[tuple[str, ...]] = [("", "cards", "memory", "used a GPU", most, "tokens/s", offload)]
    for one in holding:
        sizes = (f"{size / GIB:,.1f} GiB" for size in (one.memory_bytes, one.needed_bytes))
        where = ("NVMe" if "nvme" in one.offload else "host") if one.offload else ""
        counts = (f"{one.most:,}", f"{one.tokens_per_s:,.0f}")
        rows.append(("→" * (one is least), one.cluster.name, *sizes, *counts, where))
    yield from [*table(rows, align="<<>>>><", names=(6,)), ""] if holding else ()
    if least:
        yield from wrapped(f"→ the least memory that holds it; in full: --gpus {least.cluster.name}")
    too_small = [holder.cluster.name for holder in holders if not holder.most]
    if too_small:
        yield from wrapped(f"too small: {', '.join(too_small)}")


def holder_figures(shape: ModelShape, holders: list[Holder], *, most: str) -> dict[str, Any]:
    """Return the same as JSON values."""
    least = smallest(holders)
    return {
        "version": __version__,
        "model": picked(shape, "name parameters exact"),
        "smallest": least.cluster.name if least else None,
        "cards": [
            picked(holder, "gpus:cluster.name memory_bytes")
            | {"fits": bool(holder.most)}
            | picked(holder, f"used_bytes:needed_bytes {most.replace('-', '_')}:most tokens_per_s offload")
            for holder in holders
        ],
    }
