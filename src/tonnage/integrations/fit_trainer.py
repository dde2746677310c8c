"""`tonnage.fit` for the Hugging Face Trainer.

    tonnage.fit_trainer(trainer, budget="40 GiB")
    trainer.train()

The Trainer keeps its loop: callbacks, schedules, logs and checkpoints are its own. Only the optimizer step changes:
its batches (`per_device_train_batch_size`, `gradient_accumulation_steps` of them) are computed when the last one
arrives, in micro-batches as planned, and `optimizer.step()` is the stepper's.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

from tonnage.errors import RequestError
from tonnage.fit.fitted import Fitted
from tonnage.fit.plan import FitPlan
from tonnage.fit.stepping.batches import Weighting, tensors
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.autocast import Autocast, ScaledStepper
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.training import Training, Undo
from tonnage.fit.weighting import find_weighting
from tonnage.integrations.fit_options import FitOptions
from tonnage.integrations.trainer_step import ITEMS, Inputs, TrainerStep, join, with_items


def fit_trainer(
    trainer: Any,
    *,
    budget: str | int | None = None,
    host: str | int | None = None,
    exact: bool = True,
    allow: Sequence[str] = (),
    without: Sequence[str] = (),
    weighting: Weighting = "auto",
    dropout: str = "same",
    plan: FitPlan | str | Path | None = None,
    sample: Inputs | None = None,
    measure: bool = True,
    verbose: bool = False,
) -> Fitted:
    """Make a Trainer's training fit a byte budget. Its own arguments apply: batch, accumulation, clipping, precision.

    `sample` is a batch from the data loader; if batches differ in length, the longest. Without it, the batches of the
    first step are used. The other arguments are those of `tonnage.fit`.
    """
    options = FitOptions(
        budget=budget,
        host=host,
        exact=exact,
        allow=allow,
        without=without,
        weighting=weighting,
        dropout=dropout,
        plan=plan,
        measure=measure,
        verbose=verbose,
    )
    _check(trainer)
    with ExitStack() as stack:
        stack.callback(_without_checkpointing(trainer))
        _prepare_model(trainer)
        with _made_optimizer(trainer) as optimizer:
            fitted, step = _fit(trainer, optimizer, options, sample)
        stack.callback(_drive(trainer, fitted, step))
        fitted.afterwards(stack.pop_all().close)
    return fitted


# What a Trainer may ask for -------------------------------------------------------------------------------------------


def _check(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise RequestError(
            f"fit_trainer wants a transformers.Trainer, and got {type(trainer).__name__}.",
            hint="Give the Trainer itself.",
        )
    for problem, hint in _problems(trainer):
        raise RequestError(f"This Trainer cannot be fitted: {problem}.", hint=hint)


def _problems(trainer: Any) -> Iterator[tuple[str, str]]:
    args, optim = trainer.args, str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if isinstance(trainer, FittedSteps):
        yield "it is fitted already", "Call undo() on what fit_trainer returned, then fit again."
    if args.world_size > 1 or args.n_gpu > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        yield "it trains on several devices, whose wrapper changes the model after fit", "Train on one GPU."
    if trainer.model_init is not None:
        yield "model_init= makes another model when training begins", "Give model= instead."
    if args.auto_find_batch_size:
        yield "auto_find_batch_size makes the batch smaller when memory runs out", "Leave it out: fit keeps the batch."
    if args.torch_compile:
        yield "torch_compile wraps the whole model", "Leave it out: fit compiles block by block where it pays."
    if args.use_liger_kernel:
        yield (
            "use_liger_kernel changes the model again when training begins",
            "Leave it out: fit computes the loss in chunks.",
        )
    if "lomo" in optim or "layerwise" in optim:
        yield f"optim={optim!r} takes its steps by itself in backward", "Use adamw_torch."


def _without_checkpointing(trainer: Any) -> Undo:
    """Turn gradient checkpointing off: fit chooses what is recomputed."""
    args, on = trainer.args, trainer.args.gradient_checkpointing
    modules = [module for module in trainer.model.modules() if getattr(module, "gradient_checkpointing", False)]
    if on or modules:
        warnings.warn("gradient_checkpointing is turned off: fit chooses which blocks are recomputed.", stacklevel=3)
    args.gradient_checkpointing = False
    for module in modules:
        module.gradient_checkpointing = False

    def undo() -> None:
        args.gradient_checkpointing = on
        for module in modules:
            module.gradient_checkpointing = True

    return undo


def _prepare_model(trainer: Any) -> None:
    """Prepare the model as the Trainer does when training begins, so that fit sees it under autocast."""
    accelerator = trainer.accelerator
    if _mixed(trainer) and accelerator.autocast_handler is None:
        # The cache would keep a half-precision copy of every weight, and reuse copies made without gradients.
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    accelerator.prepare(trainer.model)
    trainer.model.train()


def _mixed(trainer: Any) -> bool:
    return trainer.accelerator.mixed_precision in ("bf16", "fp16")


@contextmanager
def _made_optimizer(trainer: Any) -> Iterator[Optimizer]:
    """Create the Trainer's optimizer, which it normally does when training begins; undo that if fit fails."""
    before = trainer.optimizer
    optimizer = trainer.create_optimizer()
    try:
        yield optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    except BaseException:
        trainer.optimizer = before
        raise


# One step's batches ---------------------------------------------------------------------------------------------------


def _fit(
    trainer: Any, optimizer: Optimizer, options: FitOptions, sample: Inputs | None
) -> "tuple[Fitted, TrainerStep]":
    batches, items = _first_batches(trainer, sample)
    largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in tensors(batch)))
    alike = join(batches) is not None
    step_sample = with_items(join([largest] * len(batches)) or largest, items)
    loss = _loss_of(trainer)
    training = Training(
        model=trainer.model,
        optimizer=optimizer,
        loss=loss,
        sample=step_sample,
        device=trainer.args.device,
        stepper=Stepper(optimizer),
    )
    joins = len(batches) > 1 and _losses_add_up(training)
    several = len(batches) > 1 and not joins
    fitted = options.fit(
        trainer.model,
        optimizer,
        loss=loss,
        sample=with_items(largest, items) if several else step_sample,
        clip_norm=trainer.args.max_grad_norm or None,
        refused=dict(_refused(trainer, one_backward=not several and alike)),
        gradients_wait=several,
    )
    return fitted, TrainerStep(trainer, fitted.training, joins=joins)


def _refused(trainer: Any, *, one_backward: bool) -> Iterator[tuple[str, str]]:
    if _mixed(trainer):
        yield "autocast", f"the Trainer's own {trainer.accelerator.mixed_precision} does the same"
    if trainer.accelerator.scaler is not None:
        yield from Autocast(dtype="float16").conflicts.items()
    if not one_backward:
        yield (
            "step-in-backward",
            "a step has several backward passes (gradient_accumulation_steps), whose gradients add up",
        )


def _first_batches(trainer: Any, sample: Inputs | None) -> tuple[list[Inputs], Tensor | int | None]:
    """Return the batches of one optimizer step, without advancing the random state or the data loader."""
    count = trainer.args.gradient_accumulation_steps
    if sample is not None:
        batches, items = trainer.get_batch_samples(iter([sample] * count), count, trainer.args.device)
        return [trainer._prepare_inputs(batch) for batch in batches], items
    if trainer.train_dataset is None:
        raise RequestError("The Trainer has no train_dataset.", hint="Give it one, or a batch as sample=.")
    with _same_randomness(trainer.args.device):
        loader = trainer.get_train_dataloader()
        batches, items = trainer.get_batch_samples(iter(loader), count, trainer.args.device)
    if loader in trainer.accelerator._dataloaders:  # not if a subclass creates its own
        trainer.accelerator._dataloaders.remove(loader)
        loader.end()
    if not batches:
        raise RequestError("The Trainer's train_dataset gives no batch.", hint="Give a batch as sample=.")
    return [trainer._prepare_inputs(batch) for batch in batches], items


@contextmanager
def _same_randomness(device: torch.device) -> Iterator[None]:
    python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)


def _losses_add_up(training: Training) -> bool:
    """Whether the batches of a step may be computed as one: rows are independent, and losses add up."""
    try:
        return MicroBatches(count=2).why_not(training) is None and find_weighting(training) == "sum"
    except NotApplicable:
        return False


def _loss_of(trainer: Any) -> Callable[[nn.Module, Inputs], Tensor]:
    def loss(model: nn.Module, batch: Inputs) -> Tensor:
        inputs = dict(batch)
        items = inputs.pop(ITEMS, None)
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, inputs, num_items_in_batch=items)

    return loss


# The Trainer's loop ---------------------------------------------------------------------------------------------------


class FittedOptimizer(AcceleratedOptimizer):
    """The Trainer's optimizer, whose step is the stepper's. States stay where they are when training begins."""

    def __init__(self, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True
        self._finish = finish
        self._handle = optimizer.register_step_post_hook(self._was_taken)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self._is_overflow = True  # until the step is taken: a scaler skips steps whose gradients overflow
            self._finish()

    def _was_taken(self, *_: Any) -> None:
        self._is_overflow = False

    def let_go(self) -> Optimizer:
        self._handle.remove()
        return self.optimizer


class FittedSteps(Trainer):
    """The overridden methods of a fitted Trainer.

    This class goes between the Trainer's own class and `transformers.Trainer`, so that `super().training_step` of a
    subclass leads here.
    """

    fitted_step: TrainerStep

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        model.train()
        self.optimizer.train()
        loss = self.fitted_step.take(self._prepare_inputs(inputs), num_items_in_batch)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.cuda.empty_cache()
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.fitted_step.gradient_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Any:
        if grad_norm is None and not self.fitted_step.keeps_gradients:
            return None  # they are freed after the step, so no norm is logged
        return super()._get_grad_norm(model, grad_norm)


def _drive(trainer: Any, fitted: Fitted, step: TrainerStep) -> Undo:
    plain_class = type(trainer)
    bases = (FittedSteps,) if plain_class is Trainer else (plain_class, FittedSteps)
    with ExitStack() as stack:
        if trainer.accelerator.scaler is not None:
            training = fitted.training
            stepper = ScaledStepper(training.optimizer, training.device, clip_norm=training.stepper.clip_norm)
            stepper.scaler = trainer.accelerator.scaler
            stack.callback(fitted.training.replace_stepper(stepper))
        if _mixed(trainer):
            fitted.training.applied.insert(0, "autocast")  # the Trainer's own: a proof allows for its rounding
            stack.callback(fitted.training.applied.remove, "autocast")
        trainer.fitted_step = step
        stack.callback(trainer.__dict__.pop, "fitted_step")
        trainer.__class__ = type(plain_class.__name__, bases, {})
        stack.callback(setattr, trainer, "__class__", plain_class)
        optimizer = FittedOptimizer(fitted.optimizer, step.finish)
        trainer.optimizer = optimizer
        stack.callback(lambda: setattr(trainer, "optimizer", optimizer.let_go()))
        return stack.pop_all().close
