"""The duration and cost of a whole training run, as text and as JSON values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonnage.clock.step import SteadyStep
    from tonnage.planner.training.search import TrainingPlan

_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """How much is trained on, and the price of a GPU hour."""

    tokens: float | None = None
    samples: float | None = None
    epochs: float = 1.0
    price: float | None = None


NONE = Campaign()


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
