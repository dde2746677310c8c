"""Group ranks with the same figures into kinds, and find the typical kind and the outliers of a cluster.

Ranks are compared by their process's peak memory. A kind is an outlier if it is farther from the median of all ranks
than 2.5 times the usual distance (the median absolute deviation, scaled as for a normal distribution) and than a
twentieth of the median. Kinds are weighted by their ranks, so fewer than half of the ranks are ever outliers: of two
ranks none is, nor of pipeline stages that need less and less. Ranks that failed or were stopped hold less than they
would have and are not compared; if only half of the ranks remain, none are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tonnage.ledger import Category
from tonnage.recording import ClusterSummary, RankSummary
from tonnage.report.lines import table_unit
from tonnage.units import format_bytes

# What a process holds beside the ledger's categories.
BEYOND, OUTSIDE = "beyond", "outside"
LABELS = {str(category): category.label for category in Category} | {
    BEYOND: "reserved beyond tensors",
    OUTSIDE: "outside PyTorch",
}
_USUAL = 2.5 * 1.4826
_SHARE_OF_MEDIAN = 0.05
_PARTS_NAMED = 3
_WORTH_NAMING = 0.1
_VERDICTS = {"ok": "", "oom": "out of memory", "error": "failed", "depends": "depends on values"}


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Ranks with the same figures: those of `first`, the lowest rank that ran."""

    first: RankSummary
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its rank numbers: "rank 7", "ranks 0–3, 8"."""
        return f"rank{'s' * (len(self.ranks) > 1)} {spans_of(self.ranks)}"

    @property
    def verdict(self) -> str:
        """How it ended, if that is worth mentioning."""
        return "stopped" if self.first.stopped else _VERDICTS[self.first.outcome]

    @property
    def process_bytes(self) -> int:
        """Peak memory of the process."""
        return self.first.peak_process_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by category at the peak, and the remainder of the process's memory."""
        allocated, reserved = self.first.peak_allocated_bytes, self.first.peak_reserved_bytes
        outside = max(0, self.process_bytes - reserved)
        return self.first.ledger | {BEYOND: max(0, reserved - allocated), OUTSIDE: outside}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The kinds of a cluster by first rank, the typical one (None if there is nothing to compare), and the outliers."""

    kinds: tuple[Kind, ...]
    typical: Kind | None
    odd: tuple[Kind, ...]

    def over_typical(self, kind: Kind) -> dict[str, int]:
        """Return the difference of each part from the typical kind's."""
        usual = self.typical.parts if self.typical else {}
        own = kind.parts
        return {part: own.get(part, 0) - usual.get(part, 0) for part in LABELS if part in own or part in usual}

    def over_bytes(self, kind: Kind) -> int:
        """Return the total difference from the typical kind."""
        return kind.process_bytes - (self.typical.process_bytes if self.typical else 0)

    @property
    def most(self) -> str:
        """Name of the typical kind: "most ranks" if it has more than half of them, else "the median rank"."""
        is_majority = self.typical is not None and 2 * len(self.typical.ranks) > _count(self.kinds)
        return "most ranks" if is_majority else "the median rank"

    def words_of(self, kind: Kind) -> str:
        """Return "rank 7 holds 3.10 GiB more than most ranks: gradients +2.00 GiB, activations +1.10 GiB"."""
        over = self.over_bytes(kind)
        direction, unit = "more" if over >= 0 else "less", table_unit(abs(over))
        verb = "holds" if len(kind.ranks) == 1 else "hold"
        # The parts that make the difference, and the rest if it is large; then they sum to it exactly.
        ranked = sorted(self.over_typical(kind).items(), key=lambda entry: -abs(entry[1]))
        least = _WORTH_NAMING * abs(ranked[0][1])
        parts = [(LABELS[part], size) for part, size in ranked[:_PARTS_NAMED] if abs(size) >= least]
        rest = over - sum(size for _, size in parts)
        parts += [("the rest", rest)] if abs(rest) >= least else []
        why = ", ".join(f"{name} {signed(size, unit)}" for name, size in parts)
        return f"{kind.name} {verb} {format_bytes(abs(over), unit)} {direction} than {self.most}: {why}"


def compare_ranks(summary: ClusterSummary) -> Comparison:
    """Find ranks that are alike, and outliers."""
    # Ranks with the same figures are of one kind.
    alike: dict[object, list[RankSummary]] = {}
    for rank in summary.ranks:
        figures = (
            *(rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.peak_process_bytes, rank.outcome, rank.stopped),
            *(frozenset(sizes.items()) for sizes in (rank.ledger, rank.engine_bytes)),
        )
        alike.setdefault(figures, []).append(rank)
    found = [
        Kind(same[0], tuple(sorted(other for rank in same for other in rank.stands_for))) for same in alike.values()
    ]
    kinds = tuple(sorted(found, key=lambda kind: kind.ranks[:1]))
    compared = [kind for kind in kinds if not kind.first.stopped and kind.first.outcome not in ("error", "depends")]
    if 2 * _count(compared) <= _count(kinds):
        return Comparison(kinds, None, ())
    typical = _median({kind: kind.process_bytes for kind in compared})
    away = {kind: abs(kind.process_bytes - typical.process_bytes) for kind in compared}
    usual = away[_median(away, upper=True)]
    limit = max(_USUAL * usual, _SHARE_OF_MEDIAN * typical.process_bytes)
    return Comparison(kinds, typical, tuple(kind for kind in compared if away[kind] > limit))


def signed(size_bytes: int, unit: str) -> str:
    """Format a difference: "+2.00 GiB"."""
    return f"{'+' if size_bytes >= 0 else '−'}{format_bytes(abs(size_bytes), unit)}"


def spans_of(ranks: Iterable[int], width: int = 40) -> str:
    """Format number ranges: "0–3, 8"; only the first and last if all would be too wide."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}–{last}" for first, last in spans]
    every = ", ".join(words)
    return every if len(every) <= width else f"{words[0]}, … {words[-1]}"


def _count(kinds: Iterable[Kind]) -> int:
    return sum(len(kind.ranks) for kind in kinds)


def _median(levels: Mapping[Kind, int], *, upper: bool = False) -> Kind:
    """Return the median kind, weighted by ranks; of two, the lower or upper."""
    half, before = _count(levels) / 2, 0
    ordered = sorted(levels, key=lambda kind: (levels[kind], kind.ranks[:1]))
    for kind in ordered:
        before += len(kind.ranks)
        if before > half or (before == half and not upper):
            return kind
    return ordered[-1]
