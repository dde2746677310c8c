"""A profile against ceilings: every item with its verdict and advice, and sums."""

from dataclasses import dataclass, replace

from tonnage.roofline.advice import advice_for
from tonnage.roofline.ceilings import Ceilings
from tonnage.roofline.classes import Bound, Verdict, judge
from tonnage.roofline.items import Item
from tonnage.roofline.profile import RooflineProfile

SLOW = 1.25  # times what the clock expects, which is itself off by about a tenth
_WORTH = 0.002  # of all time


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """A judged item. `seconds` is measured, or the least that the ceilings allow; `lost_s` is what its bound does not
    explain.

    `expected_s` is what the clock expects of such kernels on this GPU, None if unknown.
    """

    item: Item
    verdict: Verdict
    seconds: float
    advice: str
    expected_s: float | None = None

    @property
    def slower(self) -> float | None:
        """Measured over expected time."""
        return self.seconds / self.expected_s if self.expected_s else None

    @property
    def lost_s(self) -> float:
        """Time beyond the least that its bound needs; 0 if that is unknown."""
        return 0.0 if self.verdict.bound is Bound.UNKNOWN else max(0.0, self.seconds - self.verdict.bound_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A profile and its rows, the longest first."""

    profile: RooflineProfile
    ceilings: Ceilings
    rows: tuple[RooflineRow, ...]

    @property
    def measured(self) -> bool:
        """Whether times are measured, not predicted."""
        return self.profile.kind != "model"

    @property
    def seconds(self) -> float:
        """Seconds of all rows."""
        return sum(row.seconds for row in self.rows)

    def part(self, seconds: float) -> float:
        """Return the share of all rows' time."""
        return seconds / self.seconds if self.seconds else 0.0

    def seconds_by_bound(self) -> dict[Bound, float]:
        """Return the seconds of every class, most first, omitting empty ones."""
        sums = {bound: sum(row.seconds for row in self.rows if row.verdict.bound is bound) for bound in Bound}
        return {bound: sums[bound] for bound in sorted(sums, key=lambda bound: -sums[bound]) if sums[bound]}

    @property
    def expected(self) -> tuple[float, float]:
        """Return measured and expected seconds of the rows that the clock knows."""
        known = [row for row in self.rows if row.expected_s is not None]
        return sum(row.seconds for row in known), sum(row.expected_s or 0.0 for row in known)

    def slow_rows(self, least: float = SLOW) -> list[RooflineRow]:
        """Return rows slower than the clock expects, the largest excess first."""
        worth_s = _WORTH * self.seconds
        slow = [
            row
            for row in self.rows
            if row.expected_s and row.seconds > max(least * row.expected_s, row.expected_s + worth_s)
        ]
        return sorted(slow, key=lambda row: (row.expected_s or 0.0) - row.seconds)

    @property
    def host_s(self) -> float:
        """Host time to launch the kernels one by one."""
        return sum(row.item.launches for row in self.rows) * self.ceilings.launch_s


def analyse(profile: RooflineProfile, ceilings: Ceilings) -> Analysis:
    """Judge every item."""
    rows = sorted((_row(_proven(item, ceilings), ceilings) for item in profile.items), key=lambda row: -row.seconds)
    return Analysis(profile=profile, ceilings=ceilings, rows=tuple(rows))


def _row(item: Item, ceilings: Ceilings) -> RooflineRow:
    verdict = judge(item, ceilings)
    seconds = verdict.bound_s if item.seconds is None else item.seconds
    return RooflineRow(
        item=item,
        verdict=verdict,
        seconds=seconds,
        advice=advice_for(item, verdict, ceilings),
        expected_s=_expected_s(item, ceilings),
    )


def _expected_s(item: Item, ceilings: Ceilings) -> float | None:
    if item.seconds is None or ceilings.card is None or not (item.made or item.link):
        return None
    from tonnage.roofline.expected import expected_s  # it imports numpy

    return expected_s(item, ceilings.card)


def _proven(item: Item, ceilings: Ceilings) -> Item:
    """Correct the precision: FP32 faster than the GPU's FP32 rate was TF32."""
    work, seconds = item.work, item.seconds
    if work.precision != "fp32" or not work.operations or not seconds or "tf32" not in ceilings.rates:
        return item
    if work.operations / seconds <= ceilings.rate("fp32"):
        return item
    return replace(item, work=replace(work, precision="tf32"))
