"""The duration of a step, and the duration and cost of a whole training, as text and as JSON values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tonnage.report.lines import packed, picked, texts
from tonnage.units import percent

if TYPE_CHECKING:
    from rich.text import Text

    from tonnage.clock.step import SteadyStep
    from tonnage.planner.training.search import TrainingPlan
    from tonnage.recording import ClusterRecording, ClusterSummary, Recording

_WORTH_SAYING = 0.02  # of a step's time
_ALIKE = 0.01  # of it, between ranks
_LEAST_PEAK = 0.005  # of the GPU's rate
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """How much is trained on, and the price of a GPU hour."""

    tokens: float | None = None
    samples: float | None = None
    epochs: float = 1.0
    price: float | None = None


NONE = Campaign()


def time_lines(recording: "Recording", campaign: Campaign = NONE) -> "Iterator[Text]":
    """Yield the step, its breakdown, and the whole training if one was named."""
    time = recording.step_time
    if time is None:
        return
    yield from texts(packed(step_words(time)))
    yield from _kind_lines(time)
    yield from texts(packed(campaign_words(time, campaign)))


def rank_time_lines(cluster: "ClusterRecording") -> "Iterator[Text]":
    """Yield the step of the rank that all others wait for, and its breakdown."""
    slowest = cluster.summary.slowest
    time = cluster.recording_of(slowest.rank).step_time if slowest else None
    if slowest is None or time is None:
        return
    yield from texts(packed(step_words(time, rank_words(cluster.summary))))
    yield from _kind_lines(time)


def rank_words(summary: "ClusterSummary") -> str:
    """Return "every rank", or "rank 7, the slowest"."""
    times = [rank.step_time_s or 0.0 for rank in summary.ranks]
    alike = max(times, default=0.0) <= (1 + _ALIKE) * min(times, default=0.0)
    return "every rank" if alike or summary.slowest is None else f"rank {summary.slowest.rank}, the slowest"


def _kind_lines(time: "SteadyStep") -> "Iterator[Text]":
    words = (f"{kind} {percent(share, 0)}" for kind, share in shares(time).items() if share >= _WORTH_SAYING)
    yield from texts(packed(words))


def step_words(time: "SteadyStep", where: str = "") -> list[str]:
    """Return "a step takes about 412 ms on the h200 (388 to 440 ms)", "39,700 tokens/s", "41 % of its peak"."""
    on = where or f"the {time.gpu.key}"
    # The range, like "388 to 440 ms".
    low, high = time_words(time.low_s), time_words(time.high_s)
    amount, _, unit = low.partition(" ")
    about = f"{amount if high.endswith(' ' + unit) else low} to {high}"
    words = [f"a step takes about {time_words(time.step_s)} on {on} ({about})"]
    # Tokens per second, or samples if there are none.
    count, what = (time.tokens, "tokens") if time.tokens else (time.samples, "samples")
    if count:
        pace = count / time.step_s
        rounded = f"{float(f'{pace:.3g}'):,.0f}" if pace >= 100 else f"{pace:.3g}"
        words.append(f"{rounded} {what}/s{' a rank' if where else ''}")
    if time.share_of_peak is not None and time.share_of_peak >= _LEAST_PEAK:
        words.append(f"{percent(time.share_of_peak, 0)} of its peak")
    return words


def shares(time: "SteadyStep") -> dict[str, float]:
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


def time_figures(recording: "Recording", campaign: Campaign = NONE) -> dict[str, Any]:
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


def campaign_words(time: "SteadyStep | TrainingPlan", campaign: Campaign, *, gpus: int = 1) -> list[str]:
    """Say how long the whole training takes and what it costs."""
    steps = _steps(time, campaign)
    if steps is None:
        asked = campaign.tokens or campaign.samples
        return ["how many tokens or samples a step has is not known, so neither is the whole training"] if asked else []
    hours = steps * time.step_s / _HOUR_S
    tokens, samples = campaign.tokens, (campaign.samples or 0) * campaign.epochs
    words = [f"{_count(tokens)} tokens" if tokens else f"{_count(samples)} samples"]
    words[0] += f": {hours_words(hours)}"
    if campaign.price is not None:
        an_hour = f"{campaign.price:,.2f} an hour" + (" and GPU" if gpus > 1 else "")
        words.append(f"at {an_hour}: {hours * campaign.price * gpus:,.2f}")
    return words


def campaign_figures(
    time: "SteadyStep | TrainingPlan", campaign: Campaign, *, gpus: int = 1
) -> dict[str, float | None]:
    """Return the same as JSON values; None without a named training or if its steps are unknown."""
    steps = _steps(time, campaign)
    if steps is None:
        return {}
    training_s = steps * time.step_s
    cost = None if campaign.price is None else training_s / _HOUR_S * campaign.price * gpus
    return {"training_s": training_s, "training_cost": cost}


def _steps(time: "SteadyStep | TrainingPlan", campaign: Campaign) -> float | None:
    asked, of_step = (campaign.tokens, time.tokens) if campaign.tokens else (campaign.samples, time.samples)
    return asked * campaign.epochs / of_step if asked and of_step else None


def hours_words(hours: float) -> str:
    """Format a duration: "7.0 hours", "3.2 days", "12 minutes"."""
    if hours >= 72:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _count(amount: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= size:
            return f"{amount / size:.3g} {letter}"
    return f"{amount:.0f}"
