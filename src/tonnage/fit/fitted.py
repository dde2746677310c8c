"""A fitted training: step it, prove it, undo it."""

import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tonnage.errors import RequestError
from tonnage.fit.applied import Applied
from tonnage.fit.checks import FITTED
from tonnage.fit.choose.summary import summary
from tonnage.fit.plan import FitPlan
from tonnage.fit.prove.first_proof import MOST_ROWS, culprit_of, fixed_bytes_of, prove_first, rows_within
from tonnage.fit.prove.proof import NotProven, NotTheSame, Proof, prove
from tonnage.fit.prove.rehearsal import Rehearsed
from tonnage.fit.stepping.batches import Weighting
from tonnage.fit.stepping.step import take_step
from tonnage.fit.technique import Technique, find_conflict
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.training import Batch, Training, Undo
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.fit.weighting import find_weighting


@dataclass(eq=False, repr=False)
class Fitted:
    """What `fit` returns. The model and the optimizer are the caller's own objects, changed in place."""

    training: Training
    _applied: Applied
    plan: FitPlan
    measured: Rehearsed | None = None
    proof: Proof | None = None  # made once the techniques were applied
    left_out: dict[str, str] = field(default_factory=dict)  # techniques that were considered, and why not applied
    _refit: "Callable[[str | int | None, str | int | None], Fitted] | None" = None
    not_proven: str = ""  # why there is no proof, if one was wanted
    _undone: bool = field(init=False, default=False)
    _afterwards: ExitStack = field(init=False, default_factory=ExitStack)

    def __post_init__(self) -> None:
        FITTED.add(self.training.model)

    @property
    def model(self) -> nn.Module:
        return self.training.model

    @property
    def optimizer(self) -> Optimizer:
        return self.training.optimizer

    @property
    def techniques(self) -> tuple[Technique, ...]:
        return self._applied.techniques

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Make the model compute as it did before fit, inside this context."""
        self._check()
        with self._applied.only(lambda technique: False):
            yield

    def step(self, batch: Batch) -> Tensor:
        """Take one optimizer step and return the loss of the whole batch. If it raises, gradients are restored."""
        self._check()
        return take_step(self.training, batch)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Wrap a loop whose number of batches may differ between ranks: finished ranks keep stepping with the others.

        An error inside it on one rank, in its data loader for example, ends the job on all.
        """
        self._check()
        ranks = self.training.ranks
        with ranks.agreement.telling() if ranks is not None else nullcontext():
            yield
        ranks = self.training.ranks
        while ranks is not None and ranks.follow(self.training):
            pass

    def prove(self, batch: Batch | None = None) -> Proof:
        """Compare loss and gradients under fit with the plain model's, on this batch. Changes nothing."""
        self._check()
        return prove(self._applied, self.training.sample if batch is None else batch)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Save the plan as JSON, for `fit(..., plan=path)` here or elsewhere."""
        self.plan.save(path, force=force)

    def refit(self, budget: str | int | None = None, *, host: str | int | None = None) -> "Fitted":
        """Fit the same training to another budget, reusing the survey. This object is invalid afterwards."""
        self._check()
        if self._refit is None:
            raise RequestError(
                "This fit came from a plan, and nothing was surveyed.", hint="Call undo() and tonnage.fit."
            )
        self._undone = True
        FITTED.discard(self.training.model)
        return self._refit(budget, host)

    def undo(self) -> None:
        """Restore the model and the optimizer, keeping what they have learned."""
        self._check()
        self._applied.take_away()
        self._undone = True
        FITTED.discard(self.training.model)
        self._afterwards.close()

    def afterwards(self, undo: Undo) -> None:
        """Register a function to call on undo: this is how a Trainer gets its own loop back."""
        self._afterwards.callback(undo)

    def _check(self) -> None:
        if self._undone:
            raise RequestError("This fit was undone already; the model is plain.", hint="Call tonnage.fit again.")

    def __str__(self) -> str:
        lines = [summary(self.plan, self.measured)]
        if self.proof is not None:
            rows = "1 row" if self.proof.rows == 1 else f"{self.proof.rows} rows"
            lines.append(f"proven on {rows}: gradients differ by {self.proof.worst_error:.0e} of their norm at most")
            lines += textwrap.wrap(self.proof.beside, 80, initial_indent="  ", subsequent_indent="  ")
        if self.not_proven:
            lines += textwrap.wrap(f"not proven: {self.not_proven}", 80, subsequent_indent=" " * 6)
        for name, reason in self.left_out.items():
            lines += textwrap.wrap(f"without {name}: {reason}", 80, subsequent_indent=" " * 6, break_on_hyphens=False)
        return "\n".join(lines)


def apply_plan(training: Training, plan: FitPlan, *, weighting: Weighting = "auto") -> Fitted:
    """Apply a plan made here or elsewhere. `weighting` is for parts of a batch, if the plan cannot hold it."""
    problem = find_conflict(list(plan.techniques))
    if problem:
        raise RequestError(f"The plan cannot be applied: {problem}.", hint="Make it again with tonnage.fit.")
    here = torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else training.device.type
    elsewhere = (plan.device, plan.torch) != (here, torch.__version__)
    techniques = []
    for technique in plan.techniques:
        if isinstance(technique, Recompute) and elsewhere:
            # Which operators a block calls depends on device, dtype and version.
            modes = {block: mode if isinstance(mode, str) else "block" for block, mode in technique.modes.items()}
            if modes != technique.modes:
                warnings.warn(
                    f"The plan was made with torch {plan.torch or 'of an unknown version'} for {plan.device}: blocks that "
                    "keep some of their operators there are recomputed whole here, which takes less memory and more time "
                    "than it says.",
                    stacklevel=5,  # the line that calls tonnage.fit
                )
            technique = replace(technique, modes=modes)
        techniques.append(technique)
    division = next((technique for technique in techniques if isinstance(technique, MicroBatches)), None)
    applied = Applied(training)
    try:
        applied.add(technique for technique in techniques if technique is not division)
        if division is not None:
            applied.add([_weighed(division, training, weighting)])
    except BaseException:
        applied.take_away()
        raise
    return Fitted(training, applied, plan)


def _weighed(division: MicroBatches, training: Training, weighting: Weighting) -> MicroBatches:
    """Return it with the weighting that was asked for, or one that was tried on this training's loss.

    The plan's own was found for the loss that it was made with.
    """
    if weighting != "auto":
        return replace(division, weighting=weighting)
    planned = division.weighting
    if planned == "auto" or training.ranks is not None or division.why_not(training) is not None:
        return division
    return replace(
        division, weighting=find_weighting(training, resampled=division.dropout == "resampled", first=planned)
    )


def prove_plan(fitted: Fitted) -> None:
    """Prove a plan that was just applied, on a few rows, or note why that is not possible.

    If gradients differ, restore the plain training and raise.
    """
    training, applied, plan = fitted.training, fitted._applied, fitted.plan
    if not applied.techniques:
        return
    if on_virtual_gpu(training.device):
        fitted.not_proven = "a virtual GPU has no values to compare."
        return
    most_rows = MOST_ROWS
    if training.device.type == "cuda":
        most_rows = rows_within(plan, fixed_bytes_of(training))
    try:
        fitted.proof = prove_first(applied, most_rows=most_rows)
    except NotProven as problem:
        fitted.not_proven = str(problem)
        warnings.warn(f"The plan is applied, and not proven: {problem.words}", stacklevel=5)
    except NotTheSame as problem:
        culprit = culprit_of(applied)
        fitted.undo()
        cause = f" Without {culprit.name} they are the same." if culprit is not None else ""
        raise NotTheSame(
            f"The plan does not keep the gradients of this training. {problem}{cause}",
            hint="Make the plan again for this training: tonnage.fit with budget= and without plan=.",
        ) from problem
    except BaseException:
        fitted.undo()
        raise
    if training.device.type == "cuda":
        torch.cuda.empty_cache()  # steps start without what the plain model took
