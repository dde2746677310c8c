"""Find how much the parts of a batch weigh, by comparing gradients of a few rows, together and one by one.

A weighting is accepted if the weighted gradients of single rows add up to those of all, up to rounding, on rows of
the sample and on copies with uneven padding: a masked loss looks like a mean over rows as long as all masks are
full. If none does, the batch must not be divided. Class weights and ignored labels are read from the calls of the
loss function, and rows are chosen with different labels, so that a mean over the weights of classes is no mean over
rows by chance. It does not know how gradients are stored or stepped.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from tonnage.errors import RequestError
from tonnage.fit.checks import check_steppable
from tonnage.fit.denominators import LossCalls, RecordedLosses, target_weightings
from tonnage.fit.gradients import Samples, differences, gradients_of, noted_autocast, rounding
from tonnage.fit.modules import eagerly, kept_modes, undisturbed
from tonnage.fit.recomputing.remembered import as_before
from tonnage.fit.stepping.batches import (
    IGNORED_LABEL,
    BadBatch,
    MicroBatch,
    Weighting,
    batch_rows,
    change_tensors,
    find_labels,
    named_tensors,
    split,
    take_rows,
    tensors,
)
from tonnage.fit.technique import NotApplicable
from tonnage.fit.training import Batch, Training
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.units import percent

_ROWS = 4  # rows tried together and alone
_ELEMENTS = 1 << 14  # compared per gradient
_LOSS_ROUNDING, _NARROW_LOSS_ROUNDING = 1e-5, 5e-3  # for losses, if gradients do not fit
# Tolerance of weighted gradients, by that of sums in another order: kernels differ with the number of rows, and many
# models compute their loss in FP32 whatever their own dtype.
_TOLERANCES = {6e-2: 0.1, 1e-2: 4e-2, 1e-4: 1e-3, 0.0: 1e-6}
_KEPT_SHARES = (1.0, 0.5, 0.8, 0.65, 0.9, 0.6, 0.75)  # of each row in a thinned copy, in another order per tensor
_HINT = "Give weighting= a function that says how much a part of the batch weighs, or leave micro-batches out."


def find_weighting(
    training: Training,
    *,
    resampled: bool = False,
    by_losses: bool = False,
    narrow: torch.dtype | None = None,
    first: Weighting | None = None,
) -> Weighting:
    """Return the weighting under which single rows add up to the batch; a guess on a virtual GPU, which has no values.

    `resampled` turns dropout off meanwhile. `by_losses` uses no gradients, which take memory and, over several
    ranks, the same steps on all. `narrow` is the dtype that the model computes in if its parameters are wider.
    `first` is tried before others.
    """
    likely: list[Weighting] = [likely_weighting(training.model, training.sample)]
    if first is not None:
        likely.insert(0, first)
    if batch_rows(training.sample) < 2 or on_virtual_gpu(training.device):
        return likely[0]
    seen: list[torch.dtype] = []
    with (
        undisturbed(training.model, training.device),
        as_before(training.loss, training.model),
        kept_modes(training.model, evaluating=resampled),
        eagerly(),  # these shapes occur only here
    ):
        try:
            with noted_autocast(training, seen):
                calls = _check_repeats(training)
            return _established(training, likely, calls, by_losses=by_losses, narrow=seen[0] if seen else narrow)
        except (NotApplicable, RequestError, torch.OutOfMemoryError):
            raise
        except Exception as problem:
            if by_losses:  # other ranks wait for it
                raise
            words = (str(problem).strip().splitlines() or [""])[0]
            raise NotApplicable(
                f"The loss does not take rows of the sample by themselves ({type(problem).__name__}: {words[:200]}).",
                hint="Leave micro-batches out.",
            ) from problem


def _established(
    training: Training, likely: Sequence[Weighting], calls: LossCalls, *, by_losses: bool, narrow: torch.dtype | None
) -> Weighting:
    """Try with gradients of four rows, then of two, then with losses, as memory allows."""

    def gradients(parts: Sequence[MicroBatch]) -> Samples:
        torch.manual_seed(0)
        return gradients_of(training, parts, elements=_ELEMENTS)[1]

    def losses(parts: Sequence[MicroBatch]) -> Samples:
        torch.manual_seed(0)
        with torch.no_grad(), training.forward_pass():
            total = sum(float(part.weigh(training.loss(training.model, part.batch))) for part in parts)
        return {"the loss": torch.tensor([total], dtype=torch.float64)}  # in the form of a gradient with one element

    for rows in [] if by_losses else [_ROWS, 2]:
        try:
            coarsest = rounding(training, narrow)
            tolerance = next(most for least, most in _TOLERANCES.items() if coarsest >= least)
            return _fitting(training, likely, calls, rows, gradients, tolerance)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    types = {narrow, *(parameter.dtype for parameter in training.model.parameters())}
    tolerance = _NARROW_LOSS_ROUNDING if types & {torch.bfloat16, torch.float16} else _LOSS_ROUNDING
    return _fitting(training, likely, calls, _ROWS, losses, tolerance)


class _WeightingTrial:
    """A few rows, and their gradients together and alone."""

    def __init__(self, rows: Batch, measure: Callable[[Sequence[MicroBatch]], Samples]) -> None:
        self.rows = rows
        self.alone = [measure([MicroBatch(take_rows(rows, [row]), 1.0)]) for row in range(batch_rows(rows))]
        self.together = measure([MicroBatch(rows, 1.0)])

    def error(self, weighting: Weighting) -> float:
        parts = split(self.rows, len(self.alone), weighting)
        added: Samples = {}
        for part, samples in zip(parts, self.alone, strict=True):
            if float(part.weight) == 0:  # a mean over nothing is NaN
                continue
            for name, sample in samples.items():
                added[name] = added.get(name, 0.0) + sample * float(part.weight)
        return max(differences(added, self.together).values(), default=0.0)


def _fitting(
    training: Training,
    likely: Sequence[Weighting],
    calls: LossCalls,
    rows: int,
    measure: Callable[[Sequence[MicroBatch]], Samples],
    tolerance: float,
) -> Weighting:
    chosen = take_rows(training.sample, unlike_rows(training.sample, rows, calls.ignored))
    trials = [_WeightingTrial(chosen, measure)]
    # Copies with uneven padding: zeros in integers and masks, and more ignored labels if there are any.
    copies = [_thinned(chosen, _is_padded_with_zeros, 0)]
    for ignored in sorted(calls.ignored - {0}):
        copies.append(_thinned(chosen, lambda tensor, label=ignored: _holds(tensor, label), ignored))
    if not calls.explain_denominator:
        copies.append(_relabelled(chosen, training.sample))
    for batch in (batch for batch in copies if batch is not None):
        try:
            trial = _WeightingTrial(batch, measure)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the loss rejects such a batch, so none will come
            continue
        if all(torch.isfinite(sample).all() for sample in trial.together.values()):
            trials.append(trial)
    candidates = [*target_weightings(chosen, calls.means), *likely, "rows", "sum", *_measurable(chosen)]
    errors: dict[Weighting, float] = {}
    for weighting in dict.fromkeys(candidates):
        with suppress(BadBatch):  # it came with a plan, and names what this batch does not have
            errors[weighting] = max(trial.error(weighting) for trial in trials)
    for weighting, error in errors.items():
        if error <= tolerance:
            return weighting
    best = min(errors, key=errors.__getitem__)
    raise NotApplicable(
        f"No known weighting makes the gradients of {batch_rows(chosen)} rows out of those of each alone; the nearest "
        f"({best}) is off by {percent(errors[best])} in a parameter. The loss is no mean or sum over rows or tokens.",
        hint=_HINT,
    )


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


def _relabelled(rows: Batch, sample: Batch) -> Batch | None:
    """Return a copy in which each row has one label of its own, of those in the sample; None if all are the same.

    It shows weights that depend on the label, as in a mean over rare classes.
    """
    labels, all_labels = find_labels(rows), find_labels(sample)
    if labels is None or all_labels is None or not labels.ndim:
        return None
    classes = all_labels[all_labels != IGNORED_LABEL].unique()
    count = batch_rows(rows)
    if len(classes) < 2 or labels.shape[0] != count:
        return None
    changed = labels.clone()
    for row in range(count):
        label = classes[row * (len(classes) - 1) // max(1, count - 1)]
        changed[row] = torch.where(labels[row] == IGNORED_LABEL, labels[row], label)
    copied: Batch = change_tensors(rows, lambda tensor: changed if tensor is labels else tensor)
    return copied


def _is_padded_with_zeros(tensor: Tensor) -> bool:
    """Return whether 0 can stand for padding: in masks and non-negative integers, where it is a valid index."""
    if tensor.is_floating_point():
        return bool(((tensor == 0) | (tensor == 1)).all())
    return not tensor.is_complex() and bool((tensor >= 0).all())


def _holds(tensor: Tensor, label: int) -> bool:
    """Return whether it holds this label; otherwise the label may be out of range for an index."""
    is_integer = tensor.dtype != torch.bool and not tensor.is_floating_point()
    return is_integer and bool((tensor == label).any())


def _measurable(batch: Batch) -> Iterator[str]:
    """Yield weightings by the contents of a tensor: labels not ignored, nonzero elements, weights."""
    rows = batch_rows(batch)
    if find_labels(batch) is not None:
        yield from ("tokens", "shifted-tokens")
    for path, tensor in named_tensors(batch):
        if not tensor.ndim or tensor.shape[0] != rows or tensor.ndim > 3:
            continue
        if _holds(tensor, IGNORED_LABEL):
            yield from (f"tokens:{path}", f"shifted-tokens:{path}")
        elif tensor.ndim > 1 and _is_padded_with_zeros(tensor):
            yield from (f"nonzero:{path}", f"shifted-nonzero:{path}")
        elif tensor.is_floating_point() and tensor.ndim < 3 and bool((tensor >= 0).all()):
            yield f"total:{path}"


def likely_weighting(model: nn.Module, batch: Batch) -> str:
    """Guess from the names in the batch and the class of the model."""
    if hasattr(batch, "keys") and "num_items_in_batch" in batch:
        return "sum"
    labels = find_labels(batch)
    if labels is None:
        # By the last integer tensor per token: if nothing is ignored, that equals a mean over rows.
        tokens = [path for path, tensor in named_tensors(batch) if tensor.ndim > 1 and not tensor.is_floating_point()]
        return f"tokens:{tokens[-1]}" if tokens and len(list(tensors(batch))) > 1 else "rows"
    if labels.ndim < 2:
        return "tokens"
    # Causal models of transformers shift the labels; one may be inside another module.
    kinds = (f"{getattr(module, 'loss_type', '')} {type(module).__name__}" for module in model.modules())
    return "shifted-tokens" if any("ForCausalLM" in kind or "LMHead" in kind for kind in kinds) else "tokens"


def unlike_rows(batch: Batch, count: int, ignored: Collection[int] = (IGNORED_LABEL,)) -> list[int]:
    """Return rows with different labels: different numbers of them, from fewest to most, or different classes.

    Without labels these are the first rows.
    """
    rows = batch_rows(batch)
    count = min(count, rows)
    labels = find_labels(batch)
    if labels is None or not labels.ndim or labels.shape[0] != rows:
        return list(range(count))
    is_counted = torch.ones_like(labels, dtype=torch.bool)
    for label in ignored:
        is_counted &= labels != label
    if labels.ndim == 1:
        return _rows_of_classes(labels.tolist(), is_counted.tolist(), count)
    kept = is_counted.flatten(1)
    # "tokens" and "shifted-tokens" differ if a row's first label counts; a mean over no labels is NaN.
    order = sorted(zip(kept[:, 1:].sum(1).tolist(), kept[:, 0].tolist(), range(rows), strict=True))
    counted = [row for labels_kept, _, row in order if labels_kept] or list(range(rows))
    places = {round(place * (len(counted) - 1) / max(1, count - 1)) for place in range(count)}
    return [counted[place] for place in sorted(places)]


def _rows_of_classes(labels: Sequence[int], is_counted: Sequence[bool], count: int) -> list[int]:
    """Return rows of as many classes as possible, then others."""
    first_rows: dict[int, int] = {}
    for row, label in enumerate(labels):
        if is_counted[row]:
            first_rows.setdefault(label, row)
    of_classes = [first_rows[label] for label in sorted(first_rows)]
    if len(of_classes) > count:
        step = (len(of_classes) - 1) / max(1, count - 1)
        of_classes = [of_classes[round(place * step)] for place in range(count)]
    others = [row for row in range(len(labels)) if row not in set(of_classes)]
    others.sort(key=lambda row: not is_counted[row])
    return sorted([*of_classes, *others[: count - len(of_classes)]])


def _check_repeats(training: Training) -> LossCalls:
    """Check that the same rows give the same loss again: no randomness, no state carried between passes.

    Return the losses over labels that were computed meanwhile.
    """
    rows = take_rows(training.sample, unlike_rows(training.sample, 2))
    before = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with training.forward_pass(), RecordedLosses() as recorded:  # with gradients, which a loss may request itself
            loss = training.loss(training.model, rows)
        check_steppable(loss)
        losses.append(float(loss.detach()))
    for name, buffer in training.model.named_buffers():
        if name not in before or not torch.equal(buffer, before[name]):
            raise NotApplicable(
                f"{name} changes in each forward pass, which micro-batches have several of.",
                hint="Leave micro-batches out.",
            )
    if losses[0] != losses[1]:
        raise NotApplicable(
            f"The loss of the same rows is {losses[0]:.6g} and then {losses[1]:.6g}: it draws random numbers, and "
            "micro-batches draw others than the whole batch.",
            hint='Accept that with dropout="resampled", or leave micro-batches out.',
        )
    return recorded.calls
