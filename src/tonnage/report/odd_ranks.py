"""Ranks with the same figures as one kind, what is typical of a cluster, and which kinds are the odd ones out.

What counts is what a rank's process holds at most. A kind is odd where that is farther from the median of all ranks than
two and a half times what is usual (the median distance from that median, scaled as for a normal distribution), and than a
twentieth of the median. A kind counts as often as it has ranks, so fewer than half of the ranks are ever odd: of two
ranks none is, and of stages that need less and less none is either. Ranks that failed or that another rank stopped hold
less than they would have, and are not compared; nor are the others where they are but half. It knows no layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tonnage.ledger import Category
from tonnage.recording import ClusterSummary, RankSummary
from tonnage.report.lines import table_unit
from tonnage.units import format_bytes

# Beside the ledger's categories: what else a process holds.
BEYOND, OUTSIDE = "beyond", "outside"
LABELS = {str(category): category.label for category in Category} | {
    BEYOND: "reserved beyond tensors",
    OUTSIDE: "outside PyTorch",
}
_USUAL = 2.5 * 1.4826
_SHARE_OF_MEDIAN = 0.05
_PARTS_NAMED = 3
_WORTH_NAMING = 0.1
_VERDICTS = {"ok": "", "oom": "out of memory", "error": "failed"}


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Ranks with the same figures: those of `first`, the lowest of them that ran."""

    first: RankSummary
    ranks: tuple[int, ...]

    @property
    def verdict(self) -> str:
        """How it ended, where that is worth a word."""
        return "stopped" if self.first.stopped else _VERDICTS[self.first.outcome]

    @property
    def process_bytes(self) -> int:
        """All that it holds."""
        return self.first.peak_process_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by category at the peak and, beside them, what makes the sum what the process holds."""
        rank = self.first
        beyond, outside = (
            rank.peak_reserved_bytes - rank.peak_allocated_bytes,
            self.process_bytes - rank.peak_reserved_bytes,
        )
        return rank.ledger | {BEYOND: max(0, beyond), OUTSIDE: max(0, outside)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The kinds of a cluster by their first rank, the typical one (None: nothing to compare), and the odd ones."""

    kinds: tuple[Kind, ...]
    typical: Kind | None
    odd: tuple[Kind, ...]

    def over_typical(self, kind: Kind) -> dict[str, int]:
        """What each part of a kind has more than the typical kind's, or less."""
        usual = self.typical.parts if self.typical else {}
        own = kind.parts
        return {part: own.get(part, 0) - usual.get(part, 0) for part in LABELS if part in own or part in usual}

    def over_bytes(self, kind: Kind) -> int:
        """The sum of that."""
        return kind.process_bytes - (self.typical.process_bytes if self.typical else 0)

    @property
    def most(self) -> str:
        """Who the typical kind is: "most ranks" where it is more than half of them, else "the median rank"."""
        is_majority = self.typical is not None and 2 * len(self.typical.ranks) > _count(self.kinds)
        return "most ranks" if is_majority else "the median rank"

    def words_of(self, kind: Kind) -> str:
        """ "rank 7 holds 3.10 GiB more than most ranks: gradients +2.00 GiB, activations +1.10 GiB"."""
        over = self.over_bytes(kind)
        direction = "more" if over >= 0 else "less"
        verb = "holds" if len(kind.ranks) == 1 else "hold"
        unit = table_unit(abs(over))
        why = ", ".join(f"{name} {signed(size, unit)}" for name, size in self._why(kind))
        return f"{name_of(kind.ranks)} {verb} {format_bytes(abs(over), unit)} {direction} than {self.most}: {why}"

    def _why(self, kind: Kind) -> list[tuple[str, int]]:
        """The parts that make the difference, and the rest where it is worth a word; they sum to it exactly then."""
        ranked = sorted(self.over_typical(kind).items(), key=lambda entry: -abs(entry[1]))
        least = _WORTH_NAMING * abs(ranked[0][1])
        named = [(LABELS[part], size) for part, size in ranked[:_PARTS_NAMED] if abs(size) >= least]
        rest = self.over_bytes(kind) - sum(size for _, size in named)
        return [*named, ("the rest", rest)] if abs(rest) >= least else named


def compare_ranks(summary: ClusterSummary) -> Comparison:
    """Which ranks are alike, and which stand out."""
    kinds = _kinds(summary.ranks)
    compared = [kind for kind in kinds if not kind.first.stopped and kind.first.outcome != "error"]
    if 2 * _count(compared) <= _count(kinds):
        return Comparison(kinds, None, ())
    typical = _median({kind: kind.process_bytes for kind in compared})
    away = {kind: abs(kind.process_bytes - typical.process_bytes) for kind in compared}
    usual = away[_median(away, upper=True)]
    limit = max(_USUAL * usual, _SHARE_OF_MEDIAN * typical.process_bytes)
    return Comparison(kinds, typical, tuple(kind for kind in compared if away[kind] > limit))


def signed(size_bytes: int, unit: str) -> str:
    """ "+2.00 GiB"."""
    return f"{'+' if size_bytes >= 0 else '−'}{format_bytes(abs(size_bytes), unit)}"


def name_of(ranks: Sequence[int]) -> str:
    """ "rank 7", "ranks 0–3, 8"."""
    return f"rank{'s' * (len(ranks) > 1)} {spans_of(ranks)}"


def spans_of(ranks: Iterable[int], width: int = 40) -> str:
    """ "0–3, 8": neighbours as one, and the first and the last of them where all would be too wide."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank, rank])
    words = [str(first) if first == last else f"{first}–{last}" for first, last in spans]
    every = ", ".join(words)
    return every if len(every) <= width else f"{words[0]}, … {words[-1]}"


def _kinds(ranks: Sequence[RankSummary]) -> tuple[Kind, ...]:
    alike: dict[object, list[RankSummary]] = {}
    for rank in ranks:
        figures = (
            *(rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.peak_process_bytes, rank.outcome, rank.stopped),
            *(frozenset(sizes.items()) for sizes in (rank.ledger, rank.engine_bytes)),
        )
        alike.setdefault(figures, []).append(rank)
    found = [
        Kind(same[0], tuple(sorted(other for rank in same for other in rank.stands_for))) for same in alike.values()
    ]
    return tuple(sorted(found, key=lambda kind: kind.ranks[:1]))


def _count(kinds: Iterable[Kind]) -> int:
    return sum(len(kind.ranks) for kind in kinds)


def _median(levels: Mapping[Kind, int], *, upper: bool = False) -> Kind:
    """The kind in the middle, each counted as often as it has ranks; of two in the middle the lower or the upper."""
    half, before = _count(levels) / 2, 0
    ordered = sorted(levels, key=lambda kind: (levels[kind], kind.ranks[:1]))
    for kind in ordered:
        before += len(kind.ranks)
        if before > half or (before == half and not upper):
            return kind
    return ordered[-1]
