"""Find the condition under which a tensor is there, from builds of which the standing of each switch is known."""

from collections.abc import Mapping, Sequence

Sample = Mapping[str, bool]  # a condition's text → whether it holds
DEEPEST = 6


def holds(text: str, sample: Sample) -> bool:
    """Whether a condition, stated or denied, holds."""
    return sample[text] if text in sample else not sample[text.removeprefix("not (").removesuffix(")")]


def condition(samples: Sequence[tuple[Sample, bool]], depth: int = 0) -> str | None:
    """An expression that is true in exactly these samples; "" for always, None where there is none."""
    outcomes = {present for _, present in samples}
    if outcomes == {True}:
        return ""
    if outcomes == {False} or depth == DEEPEST:
        return None
    split = min(samples[0][0], key=lambda text: _impurity(samples, text))
    sides = [[pair for pair in samples if pair[0][split] is truth] for truth in (True, False)]
    if not all(sides):
        return None
    yes, no = (condition(side, depth + 1) for side in sides)
    branches = [_both(split, yes), _both(f"not ({split})", no)]
    kept = [branch for branch in branches if branch is not None]
    return f"({' or '.join(f'({branch})' for branch in kept)})" if len(kept) > 1 else (kept or [None])[0]


def _both(first: str, then: str | None) -> str | None:
    return None if then is None else f"{first} and {then}" if then else first


def _impurity(samples: Sequence[tuple[Sample, bool]], text: str) -> float:
    """The weighted Gini impurity after splitting at a switch; one that splits nothing comes last."""
    total = 0.0
    for truth in (True, False):
        side = [present for sample, present in samples if sample[text] is truth]
        if not side:
            return len(samples)
        share = sum(side) / len(side)
        total += len(side) * share * (1 - share)
    return total
