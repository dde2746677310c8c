"""The duration of a step and of a whole training, as text and as JSON values."""

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from tonnage.clock.step import SteadyStep
from tonnage.recording import ClusterRecording, ClusterSummary, Recording
from tonnage.report.campaign import NONE, Campaign, campaign_figures, campaign_words
from tonnage.report.lines import packed, picked
from tonnage.units import percent

_WORTH_SAYING = 0.02  # of a step's time
_ALIKE = 0.01  # of it, between ranks
_LEAST_PEAK = 0.005  # of the GPU's rate


def time_lines(recording: Recording, campaign: Campaign = NONE) -> Iterator[Text]:
    """Yield the step, its breakdown, and the whole training if one was named."""
    time = recording.step_time
    if time is None:
        return
    yield from map(Text, packed(step_words(time)))
    yield from _kind_lines(time)
    yield from map(Text, packed(campaign_words(time, campaign)))


def rank_time_lines(cluster: ClusterRecording) -> Iterator[Text]:
    """Yield the step of the rank that all others wait for, and its breakdown."""
    slowest = cluster.summary.slowest
    time = cluster.recording_of(slowest.rank).step_time if slowest else None
    if slowest is None or time is None:
        return
    yield from map(Text, packed(step_words(time, rank_words(cluster.summary))))
    yield from _kind_lines(time)


def rank_words(summary: ClusterSummary) -> str:
    """Return "every rank", or "rank 7, the slowest"."""
    times = [rank.step_time_s or 0.0 for rank in summary.ranks]
    alike = max(times, default=0.0) <= (1 + _ALIKE) * min(times, default=0.0)
    return "every rank" if alike or summary.slowest is None else f"rank {summary.slowest.rank}, the slowest"


def _kind_lines(time: SteadyStep) -> Iterator[Text]:
    words = (f"{kind} {percent(share, 0)}" for kind, share in shares(time).items() if share >= _WORTH_SAYING)
    yield from map(Text, packed(words))


def step_words(time: SteadyStep, where: str = "") -> list[str]:
    """Return "a step takes about 412 ms on the h200 (388 to 440 ms)", "39,700 tokens/s", "41 % of its peak"."""
    on = where or f"the {time.gpu.key}"
    words = [f"a step takes about {time_words(time.step_s)} on {on} ({range_words(time)})"]
    # Tokens per second, or samples if there are none.
    count, what = (time.tokens, "tokens") if time.tokens else (time.samples, "samples")
    if count:
        pace = count / time.step_s
        rounded = f"{float(f'{pace:.3g}'):,.0f}" if pace >= 100 else f"{pace:.3g}"
        words.append(f"{rounded} {what}/s{' a rank' if where else ''}")
    if time.share_of_peak is not None and time.share_of_peak >= _LEAST_PEAK:
        words.append(f"{percent(time.share_of_peak, 0)} of its peak")
    return words


def shares(time: SteadyStep) -> dict[str, float]:
    """Return the shares of the step's time by kind, most first, ignoring overlap of streams and gaps."""
    by_kind = time.time_by_kind
    whole = max(sum(by_kind.values()), 1e-12)
    ranked = sorted(by_kind.items(), key=lambda kind: -kind[1])
    return {kind: seconds / whole for kind, seconds in ranked}


def time_words(seconds: float) -> str:
    """Format a time: "2.31 s", "412 ms", "4.1 ms", "12 µs"."""
    if seconds >= 1:
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.2f} s"
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def range_words(time: SteadyStep) -> str:
    """Format the range: "388 to 440 ms"."""
    low, high = time_words(time.low_s), time_words(time.high_s)
    amount, _, unit = low.partition(" ")
    return f"{amount if high.endswith(' ' + unit) else low} to {high}"


def time_figures(recording: Recording, campaign: Campaign = NONE) -> dict[str, Any]:
    """Return the same as JSON values; None if no step was captured."""
    time = recording.step_time
    if time is None:
        return {}
    counts = {"tokens_per_s": time.tokens, "samples_per_s": time.samples}
    return (
        picked(time, "step_time_s:step_s step_time_low_s:low_s step_time_high_s:high_s")
        | {name: count / time.step_s if count else None for name, count in counts.items()}
        | picked(time, "share_of_peak host_s:timeline.host_s time_by_kind")
        | campaign_figures(time, campaign)
    )
