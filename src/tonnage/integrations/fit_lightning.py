"""`tonnage.fit` for Lightning.

    trainer = lightning.Trainer(callbacks=[FitCallback(budget="40 GiB")])
    trainer.fit(module, loader)

The training is fitted on its first batch and restored when training ends. Lightning keeps its loop, loggers,
schedulers and checkpoints; fit takes over forward, backward and the optimizer step of automatic optimization.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tonnage.errors import RequestError
from tonnage.fit.fitted import Fitted
from tonnage.fit.fitting import FitOptions
from tonnage.fit.stepping.step import accumulate
from tonnage.fit.training import Batch, Training, Undo, set_attributes
from tonnage.integrations.fit_options import fit_in_loop, parts_of

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.model_helpers import is_overridden
else:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.utilities.model_helpers import is_overridden

# Hooks that fit replaces; a module's own version would be ignored.
_HOOKS = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")


@dataclass(kw_only=True, eq=False, repr=False)
class FitCallback(FitOptions, Callback):
    """Makes a Lightning training fit a byte budget. The arguments are those of `tonnage.fit`.

    `fitted` is the result of fit, from the first batch on.
    """

    fitted: Fitted | None = field(init=False, default=None)
    _active: bool = field(init=False, default=False)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise RequestError before training if it cannot be fitted."""
        for problem, hint in _problems(trainer, pl_module):
            raise RequestError(f"This training cannot be fitted: {problem}.", hint=hint)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Fit with the first batch as the sample."""
        if self._active:
            return
        plain_step = LightningStep(trainer, pl_module, batch_idx)
        refused = {}
        if "mixed" in str(trainer.precision):
            refused["autocast"] = f"precision={trainer.precision!r} does the same"
        if trainer.accumulate_grad_batches > 1:
            why = "a step has several backward passes (accumulate_grad_batches), whose gradients add up"
            refused["step-in-backward"] = why
        with ExitStack() as silent:
            for name in ("log", "log_dict"):  # of steps that only measure
                silent.callback(_replace(pl_module, name, lambda *_, **__: None))
            self.fitted = fit_in_loop(
                self,
                pl_module,
                trainer.optimizers[0],
                loss=plain_step,
                sample=batch,
                clip_norm=trainer.gradient_clip_val or None,
                refused=refused,
                gradients_wait=trainer.accumulate_grad_batches > 1,
            )
        steps = Steps(trainer, self.fitted.training, plain_step)
        with ExitStack() as stack:
            for name in ("training_step", *_HOOKS):
                stack.callback(_replace(pl_module, name, getattr(steps, name, steps.nothing)))
            self.fitted.afterwards(stack.pop_all().close)
        self._active = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the module and its optimizer, with what they have learned."""
        if self._active and self.fitted is not None:
            self._active = False
            self.fitted.undo()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore them also if training fails."""
        self.on_train_end(trainer, pl_module)


def _problems(trainer: Any, module: Any) -> Iterator[tuple[str, str]]:
    if not module.automatic_optimization:
        yield "automatic_optimization is off, so that the loop is the module's own", "Use tonnage.fit in training_step."
    if len(trainer.optimizers) != 1:
        yield f"it has {len(trainer.optimizers)} optimizers, and fit places the states of one", "Use one optimizer."
    strategy = type(trainer.strategy).__name__
    if trainer.world_size > 1 or not strategy.startswith("SingleDevice"):
        yield f"{strategy} wraps the model for several devices", "Train on one: Trainer(devices=1)."
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield "precision='16-mixed' scales the loss outside of fit", "Use precision='bf16-mixed'."
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").lower().endswith("value"):
        yield "gradients are clipped by value, and fit clips by their norm", 'Use gradient_clip_algorithm="norm".'
    if "dataloader_iter" in signature(module.training_step).parameters:
        yield "training_step takes its batches from the data loader itself", "Let it take a batch."
    for name in _HOOKS:
        if is_overridden(name, module):
            yield f"the module has a {name} of its own, which fit would pass over", f"Leave {name} out."


class LightningStep:
    """The module's own training_step, under Lightning's precision."""

    def __init__(self, trainer: Any, module: Any, batch_idx: int) -> None:
        self.function: Callable[..., Any] = module.training_step
        self.rest: tuple[Any, ...] = (batch_idx,) if len(signature(self.function).parameters) > 1 else ()
        self.output: Any = None  # the latest
        self._trainer = trainer

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with self._trainer.precision_plugin.train_step_context():
            output = self.function(batch, *self.rest)
        if output is None:
            raise RequestError(
                "training_step returned None, to leave out a batch.", hint="Return a loss of zero instead."
            )
        self.output = {k: v for k, v in output.items() if k != "loss"} if isinstance(output, Mapping) else {}
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss


class Steps:
    """Automatic optimization by fit: the hooks of a LightningModule that its Trainer calls."""

    def __init__(self, trainer: Any, training: Training, plain_step: LightningStep) -> None:
        self._trainer, self._training, self._plain_step = trainer, training, plain_step
        self._begun = False

    def training_step(self, batch: Batch, *rest: Any) -> Any:
        """Run forward and backward of a batch in micro-batches. Extra outputs are passed on if there is only one."""
        batches, training = self._trainer.accumulate_grad_batches, self._training
        self._plain_step.rest = rest
        parts = parts_of(training, batch, share=1 / batches)
        if not self._begun:
            training.stepper.begin(len(parts) * batches)
            self._begun = True
        try:
            # Lightning's autocast is on here, and backward must not run under it.
            with torch.autocast(training.device.type, enabled=False):
                closes = not self._trainer.fit_loop._should_accumulate()
                loss = accumulate(training, parts, closes=closes) * batches
        except BaseException:
            self._begun = False
            raise
        return {**(self._plain_step.output if len(parts) == 1 else {}), "loss": loss}

    def nothing(self, *_: Any, **__: Any) -> None:
        """Stand for the other hooks: training_step has run backward, and the stepper zeroes and clips gradients."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self._trainer.precision_plugin._after_closure(self._training.model, self._training.optimizer)
        self._begun = False
        self._training.stepper.finish()


def _replace(module: Any, name: str, function: Callable[..., Any]) -> Undo:
    """Replace a method by a function with its signature, which Lightning reads to know what to pass."""

    @wraps(getattr(module, name))
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return set_attributes(module, **{name: called})
