"""How much the parts of a batch weigh, found by trying: gradients of a few rows, together and one by one.

A weighting is taken where the weighted gradients of single rows make up those of all, to rounding, on rows of the sample and on
copies of them whose padding is uneven: a loss with a mask looks like a mean over rows as long as all masks are full. Where
none does, the batch must not be divided. It does not know how gradients are kept or stepped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tonnage.fit.gradients import Samples, differences, gradients_of, noted_autocast, rounding
from tonnage.fit.modules import eagerly, kept_modes
from tonnage.fit.recomputing.remembered import as_before
from tonnage.fit.stepping.batches import (
    IGNORED_LABEL,
    Part,
    Weighting,
    batch_rows,
    change_tensors,
    find_labels,
    named_tensors,
    split,
    take_rows,
    tensors,
)
from tonnage.fit.survey.undisturbed import undisturbed
from tonnage.fit.technique import NotApplicable
from tonnage.fit.training import Batch, Training
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.units import percent

_ROWS = 4  # that are tried together and alone
_ELEMENTS = 1 << 14  # of each gradient
_LOSS_ROUNDING, _NARROW_LOSS_ROUNDING = 1e-5, 5e-3  # of losses, where there is no room for gradients
# How far weighted gradients may be off, by how far sums in another order are: kernels differ with the number of rows, and many
# models make their loss in FP32 whatever their own type.
_TOLERANCES = {6e-2: 0.1, 1e-2: 4e-2, 1e-4: 1e-3, 0.0: 1e-6}
_KEPT_SHARES = (1.0, 0.5, 0.8, 0.65, 0.9, 0.6, 0.75)  # of each row in a thinned copy, another order for each tensor
_HINT = "Give weighting= a function that says how much a part of the batch weighs, or leave micro-batches out."


def find_weighting(
    training: Training, *, resampled: bool = False, by_losses: bool = False, narrow: torch.dtype | None = None
) -> Weighting:
    """The weighting under which single rows make up the batch; by its looks where there are no values (a virtual GPU).

    `resampled`: dropout is off meanwhile. `by_losses`: without gradients, which take memory and, over several ranks, the
    same steps on all. `narrow`: a type that the model computes in although its parameters are wider.
    """
    likely = likely_weighting(training.model, training.sample)
    if batch_rows(training.sample) < 2 or on_virtual_gpu(training.device):
        return likely
    seen: list[torch.dtype] = []
    with (
        undisturbed(training.model, training.device),
        as_before(training.loss, training.model),
        kept_modes(training.model, evaluating=resampled),
        eagerly(),  # shapes are seen only here
    ):
        try:
            with noted_autocast(training, seen):
                _check_repeats(training)
            return _established(training, likely, by_losses=by_losses, narrow=seen[0] if seen else narrow)
        except (NotApplicable, torch.OutOfMemoryError):
            raise
        except Exception as problem:
            if by_losses:  # other ranks wait for it
                raise
            words = (str(problem).strip().splitlines() or [""])[0]
            raise NotApplicable(
                f"The loss does not take rows of the sample by themselves ({type(problem).__name__}: {words[:200]}).",
                hint="Leave micro-batches out.",
            ) from problem


def _established(training: Training, likely: str, *, by_losses: bool, narrow: torch.dtype | None) -> Weighting:
    """Try with gradients of four rows, then of two, then with losses: as much as there is room for."""

    def gradients(parts: Sequence[Part]) -> Samples:
        torch.manual_seed(0)
        return gradients_of(training, parts, elements=_ELEMENTS)[1]

    def losses(parts: Sequence[Part]) -> Samples:
        torch.manual_seed(0)
        with torch.no_grad(), training.forward_pass():
            total = sum(float(part.weigh(training.loss(training.model, part.batch))) for part in parts)
        return {"the loss": torch.tensor([total], dtype=torch.float64)}  # as the gradient of a parameter of one element

    for rows in [] if by_losses else [_ROWS, 2]:
        try:
            coarsest = rounding(training, narrow)
            tolerance = next(most for least, most in _TOLERANCES.items() if coarsest >= least)
            return _fitting(training, likely, rows, gradients, tolerance)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    types = {narrow, *(parameter.dtype for parameter in training.model.parameters())}
    tolerance = _NARROW_LOSS_ROUNDING if types & {torch.bfloat16, torch.float16} else _LOSS_ROUNDING
    return _fitting(training, likely, _ROWS, losses, tolerance)


@dataclass(frozen=True)
class _Trial:
    """A few rows, and what they give together and alone."""

    rows: Batch
    together: Samples
    alone: list[Samples]

    def error(self, weighting: Weighting) -> float:
        parts = split(self.rows, len(self.alone), weighting)
        added: Samples = {}
        for part, samples in zip(parts, self.alone, strict=True):
            if float(part.weight) == 0:  # a mean over nothing is no number
                continue
            for name, sample in samples.items():
                added[name] = added.get(name, 0.0) + sample * float(part.weight)
        return max(differences(added, self.together).values(), default=0.0)


def _fitting(
    training: Training, likely: str, rows: int, measure: Callable[[Sequence[Part]], Samples], tolerance: float
) -> Weighting:
    chosen = take_rows(training.sample, unlike_rows(training.sample, rows))
    trials = [_trial(chosen, measure), *_thinned_trials(chosen, measure)]
    candidates = list(dict.fromkeys([likely, "rows", "sum", *_measurable(chosen)]))
    errors = {name: max(trial.error(name) for trial in trials) for name in candidates}
    fitting = [name for name, error in errors.items() if error <= tolerance]
    if fitting:
        return fitting[0]
    best = min(errors, key=errors.__getitem__)
    raise NotApplicable(
        f"No known weighting makes the gradients of {batch_rows(chosen)} rows out of those of each alone; the nearest "
        f"({best}) is off by {percent(errors[best])} in a parameter. The loss is no mean or sum over rows or tokens.",
        hint=_HINT,
    )


def _trial(rows: Batch, measure: Callable[[Sequence[Part]], Samples]) -> _Trial:
    count = batch_rows(rows)
    alone = [measure([Part(take_rows(rows, [row]), 1.0)]) for row in range(count)]
    return _Trial(rows, measure([Part(rows, 1.0)]), alone)


def _thinned_trials(rows: Batch, measure: Callable[[Sequence[Part]], Samples]) -> list[_Trial]:
    """The same rows with uneven padding: zeros in integers and masks, and more of the label that is ignored where it is used."""
    thinned = [_thinned(rows, _is_padded_with_zeros, 0), _thinned(rows, _holds_ignored, IGNORED_LABEL)]
    trials = []
    for batch in (batch for batch in thinned if batch is not None):
        try:
            trial = _trial(batch, measure)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the loss has no place for such a batch, so none will come
            continue
        if all(torch.isfinite(sample).all() for sample in trial.together.values()):
            trials.append(trial)
    return trials


def _thinned(rows: Batch, wanted: Callable[[Tensor], bool], value: int) -> Batch | None:
    count, turn = batch_rows(rows), 0

    def thin(tensor: Tensor) -> Tensor:
        nonlocal turn
        if tensor.ndim < 2 or tensor.shape[0] != count or tensor.shape[1] < 4 or not wanted(tensor):
            return tensor
        turn += 1
        changed = tensor.clone()
        for row in range(count):
            kept = int(tensor.shape[1] * _KEPT_SHARES[(row * turn + turn - 1) % len(_KEPT_SHARES)])
            changed[row, kept:] = value
        return changed

    changed = change_tensors(rows, thin)
    return changed if turn else None


def _is_padded_with_zeros(tensor: Tensor) -> bool:
    """Whole numbers, and masks: 0 stands for padding, and is an index of anything."""
    if tensor.is_floating_point():
        return bool(((tensor == 0) | (tensor == 1)).all())
    return not tensor.is_complex() and bool((tensor >= 0).all())


def _holds_ignored(tensor: Tensor) -> bool:
    """Where the sample has none, -100 may be out of the range of whatever indexes with it."""
    return not tensor.is_floating_point() and bool((tensor == IGNORED_LABEL).any())


def _measurable(batch: Batch) -> Iterator[str]:
    """Weightings by what a tensor of the batch holds: labels that are not ignored, elements that are not zero, weights."""
    rows = batch_rows(batch)
    if find_labels(batch) is not None:
        yield from ("tokens", "shifted-tokens")
    for path, tensor in named_tensors(batch):
        if not tensor.ndim or tensor.shape[0] != rows or tensor.ndim > 3:
            continue
        if _holds_ignored(tensor):
            yield from (f"tokens:{path}", f"shifted-tokens:{path}")
        elif tensor.ndim > 1 and _is_padded_with_zeros(tensor):
            yield from (f"nonzero:{path}", f"shifted-nonzero:{path}")
        elif tensor.is_floating_point() and tensor.ndim < 3 and bool((tensor >= 0).all()):
            yield f"total:{path}"


def likely_weighting(model: nn.Module, batch: Batch) -> str:
    """By the names in the batch and the class of the model."""
    if hasattr(batch, "keys") and "num_items_in_batch" in batch:
        return "sum"
    labels = find_labels(batch)
    if labels is None:
        # Of the last integers by token: where none is ever ignored, that is a mean over rows.
        tokens = [path for path, tensor in named_tensors(batch) if tensor.ndim > 1 and not tensor.is_floating_point()]
        return f"tokens:{tokens[-1]}" if tokens and len(list(tensors(batch))) > 1 else "rows"
    if labels.ndim < 2:
        return "tokens"
    # transformers' causal models compare a position with the label after it; one may stand inside another module.
    kinds = (f"{getattr(module, 'loss_type', '')} {type(module).__name__}" for module in model.modules())
    return "shifted-tokens" if any("ForCausalLM" in kind or "LMHead" in kind for kind in kinds) else "tokens"


def unlike_rows(batch: Batch, count: int) -> list[int]:
    """Rows that differ in how many labels they have, from the fewest to the most; else the first ones."""
    rows = batch_rows(batch)
    count = min(count, rows)
    labels = find_labels(batch)
    if labels is None or labels.ndim < 2:
        return list(range(count))
    kept = (labels != IGNORED_LABEL).flatten(1)
    # Rows whose first label counts differ in "tokens" and "shifted-tokens"; a mean over none is no number.
    order = sorted(zip(kept[:, 1:].sum(1).tolist(), kept[:, 0].tolist(), range(rows), strict=True))
    counted = [row for labels_kept, _, row in order if labels_kept] or list(range(rows))
    places = {round(place * (len(counted) - 1) / max(1, count - 1)) for place in range(count)}
    return [counted[place] for place in sorted(places)]


def _check_repeats(training: Training) -> None:
    """The same rows must lose the same again: nothing random, nothing that forward passes carry on to the next."""
    rows = take_rows(training.sample, unlike_rows(training.sample, 2))
    before = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with training.forward_pass():  # with gradients, which a loss may ask for itself
            losses.append(float(training.loss(training.model, rows).detach()))
    changed = [
        name for name, buffer in training.model.named_buffers()
        if name not in before or buffer.shape != before[name].shape or not torch.equal(buffer, before[name])
    ]  # fmt: skip
    if changed:
        raise NotApplicable(
            f"{changed[0]} changes in each forward pass, which micro-batches have several of.",
            hint="Leave micro-batches out.",
        )
    if losses[0] != losses[1]:
        raise NotApplicable(
            f"The loss of the same rows is {losses[0]:.6g} and then {losses[1]:.6g}: it draws random numbers, and "
            "micro-batches draw others than the whole batch.",
            hint='Accept that with dropout="resampled", or leave micro-batches out.',
        )
