"""`tonnage.fit` for the Hugging Face Trainer.

    tonnage.fit_trainer(trainer, budget="40 GiB")
    trainer.train()

The Trainer keeps its loop: callbacks, schedules, logs and checkpoints are its own. Only the optimizer step changes:
its batches (`per_device_train_batch_size`, `gradient_accumulation_steps` of them) are computed when the last one
arrives, in micro-batches as planned, and `optimizer.step()` is the stepper's.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

from tonnage.errors import RequestError
from tonnage.fit.fitted import Fitted
from tonnage.fit.fitting import FitOptions
from tonnage.fit.plan import FitPlan
from tonnage.fit.recomputing.remembered import Generators
from tonnage.fit.stepping.backward_stepper import BackwardStepper
from tonnage.fit.stepping.batches import Weighting, batch_rows, tensors
from tonnage.fit.stepping.step import accumulate
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.autocast import Autocast, ScaledStepper
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.training import Training, set_attributes
from tonnage.fit.weighting import find_weighting
from tonnage.integrations.fit_options import fit_in_loop, parts_of

Inputs = Mapping[str, Any]
ITEMS = "num_items_in_batch"  # what the Trainer divides a sum of losses by


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
    given = locals()
    options = FitOptions(**{option.name: given[option.name] for option in fields(FitOptions)})
    if not isinstance(trainer, Trainer):
        raise RequestError(
            f"fit_trainer wants a transformers.Trainer, and got {type(trainer).__name__}.",
            hint="Give the Trainer itself.",
        )
    for problem, hint in _problems(trainer):
        raise RequestError(f"This Trainer cannot be fitted: {problem}.", hint=hint)
    accelerator, made_before = trainer.accelerator, trainer.optimizer
    with ExitStack() as stack:
        # Gradient checkpointing is off: fit chooses what is recomputed.
        checkpointing = [
            module for module in trainer.model.modules() if getattr(module, "gradient_checkpointing", False)
        ]
        if trainer.args.gradient_checkpointing or checkpointing:
            warnings.warn(
                "gradient_checkpointing is turned off: fit chooses which blocks are recomputed.", stacklevel=2
            )
        for holder in (trainer.args, *checkpointing):
            stack.callback(set_attributes(holder, gradient_checkpointing=False))
        # Prepare the model as the Trainer does when training begins, so that fit sees it under autocast.
        if _mixed(trainer) and accelerator.autocast_handler is None:
            # The cache would keep a half-precision copy of every weight, and reuse copies made without gradients.
            accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
        accelerator.prepare(trainer.model)
        trainer.model.train()
        # The same for its optimizer, which is not kept if fit fails.
        optimizer = trainer.create_optimizer()
        try:
            plain = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
            fitted, step = _fit(trainer, plain, options, sample)
        except BaseException:
            trainer.optimizer = made_before
            raise
        _drive(trainer, fitted, step, stack)
        fitted.afterwards(stack.pop_all().close)
    return fitted


# What a Trainer may ask for -------------------------------------------------------------------------------------------


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
        hint = "Leave it out: fit computes the loss in chunks."
        yield "use_liger_kernel changes the model again when training begins", hint
    if "lomo" in optim or "layerwise" in optim:
        yield f"optim={optim!r} takes its steps by itself in backward", "Use adamw_torch."


def _mixed(trainer: Any) -> bool:
    return trainer.accelerator.mixed_precision in ("bf16", "fp16")


# One step's batches ---------------------------------------------------------------------------------------------------


def _fit(
    trainer: Any, optimizer: Optimizer, options: FitOptions, sample: Inputs | None
) -> "tuple[Fitted, TrainerStep]":
    batches, items = _first_batches(trainer, sample)
    largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in tensors(batch)))
    alike = join(batches) is not None
    step_sample = with_items(join([largest] * len(batches)) or largest, items)

    def loss(model: nn.Module, batch: Inputs) -> Tensor:
        inputs = dict(batch)
        items = inputs.pop(ITEMS, None)
        with trainer.compute_loss_context_manager():
            computed: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return computed

    training = Training(trainer.model, optimizer, loss, step_sample, trainer.args.device, Stepper(optimizer))
    # Batches of a step may be computed as one if rows are independent, and losses add up.
    joins = False
    if len(batches) > 1 and MicroBatches(count=2).why_not(training) is None:
        with suppress(NotApplicable):
            joins = find_weighting(training) == "sum"
    several = len(batches) > 1 and not joins
    refused = {}
    if _mixed(trainer):
        refused["autocast"] = f"the Trainer's own {trainer.accelerator.mixed_precision} does the same"
    if trainer.accelerator.scaler is not None:
        refused |= Autocast(dtype="float16").conflicts
    if several or not alike:
        why = "a step has several backward passes (gradient_accumulation_steps), whose gradients add up"
        refused["step-in-backward"] = why
    fitted = fit_in_loop(
        options,
        trainer.model,
        optimizer,
        loss=loss,
        sample=with_items(largest, items) if several else step_sample,
        clip_norm=trainer.args.max_grad_norm or None,
        refused=refused,
        gradients_wait=several,
    )
    return fitted, TrainerStep(trainer, fitted.training, joins=joins)


def _first_batches(trainer: Any, sample: Inputs | None) -> tuple[list[Inputs], Tensor | int | None]:
    """Return the batches of one optimizer step, without advancing the random state or the data loader."""
    count = trainer.args.gradient_accumulation_steps
    if sample is None and trainer.train_dataset is None:
        raise RequestError("The Trainer has no train_dataset.", hint="Give it one, or a batch as sample=.")
    generators = Generators(trainer.args.device)
    states = generators.states()
    try:
        loader: Any = trainer.get_train_dataloader() if sample is None else [sample] * count
        batches, items = trainer.get_batch_samples(iter(loader), count, trainer.args.device)
    finally:
        generators.set(states)
    if sample is None and loader in trainer.accelerator._dataloaders:  # not if a subclass creates its own
        trainer.accelerator._dataloaders.remove(loader)
        loader.end()
    if not batches:
        raise RequestError("The Trainer's train_dataset gives no batch.", hint="Give a batch as sample=.")
    return [trainer._prepare_inputs(batch) for batch in batches], items


class TrainerStep:
    """Collects the batches of an optimizer step until the last one arrives, then computes all of them."""

    def __init__(self, trainer: Any, training: Training, *, joins: bool) -> None:
        self.training, self._trainer, self._joins = training, trainer, joins
        self._waiting: list[Inputs] = []
        self._computed = False
        # The Trainer takes the norm before the step and reads it afterwards, so it is filled in between.
        self.gradient_norm = torch.zeros((), device=trainer.args.device)

    def take(self, inputs: Inputs, items: Tensor | int | None) -> Tensor:
        """Add a batch; return the step's loss with the last batch, zero before."""
        self._waiting.append(inputs)
        if not self._trainer.accelerator.sync_gradients:
            return torch.zeros((), device=self._trainer.args.device)
        # Batches of an interrupted step do not count.
        batches = self._waiting[-self._trainer.current_gradient_accumulation_steps :]
        self._waiting = []
        joined = join(batches) if self._joins else None
        # One batch's share of the step's loss, as in the Trainer: a loss that got the item count is already scaled.
        told = self._trainer.model_accepts_loss_kwargs and items is not None
        share = 1.0 if told or self._trainer.compute_loss_func is not None else 1 / len(batches)
        groups = batches if joined is None else [joined]
        parts = [part for group in groups for part in parts_of(self.training, with_items(group, items), share)]
        if len(parts) > 1 and not self.training.stepper.accumulates:
            raise RequestError(
                f"This step needs {len(parts)} backward passes (its batches are longer or of other shapes than the sample), "
                "and step-in-backward can take one.",
                hint='Pad all batches to one length, or fit_trainer(..., without=("step-in-backward",)).',
            )
        self.training.stepper.begin(len(parts))
        loss = accumulate(self.training, parts)
        self._computed = True
        return loss

    def finish(self) -> None:
        if not self._computed:
            raise RequestError(
                f"{type(self._trainer).__name__} has a training_step of its own that does not call "
                "super().training_step, so that fit saw no batch of this step.",
                hint="Call super().training_step there, or use tonnage.fit in a loop of your own.",
            )
        self._computed = False
        self.training.stepper.finish()
        norm = self.training.stepper.gradient_norm
        if norm is not None:
            self.gradient_norm.copy_(norm)


def join(batches: Sequence[Inputs]) -> dict[str, Any] | None:
    """Concatenate batches, or return None if they differ in more than their number of rows."""
    if any(set(batch) != set(batches[0]) for batch in batches):
        return None
    columns = {name: [batch[name] for batch in batches] for name in batches[0]}
    rows = [batch_rows(batch) for batch in batches]
    for values in columns.values():
        if all(isinstance(value, Tensor) for value in values):
            whole = all(value.ndim and len(value) == count for value, count in zip(values, rows, strict=True))
            joinable = whole and len({value.shape[1:] for value in values}) == 1
        else:
            joinable = not any(isinstance(value, Tensor) or value != values[0] for value in values)
        if not joinable:
            return None
    return {name: torch.cat(values) if isinstance(values[0], Tensor) else values[0] for name, values in columns.items()}


def with_items(batch: Inputs, items: Tensor | int | None) -> dict[str, Any]:
    return dict(batch) if items is None else {**batch, ITEMS: items}


# The Trainer's loop ---------------------------------------------------------------------------------------------------


class FittedOptimizer(AcceleratedOptimizer):
    """The Trainer's optimizer, whose step is the stepper's. States stay where they are when training begins."""

    def __init__(self, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True
        self._finish = finish
        self.step_hook = optimizer.register_step_post_hook(lambda *_: setattr(self, "_is_overflow", False))

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self._is_overflow = True  # until the step is taken: a scaler skips steps whose gradients overflow
            self._finish()


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
        if grad_norm is None and isinstance(self.fitted_step.training.stepper, BackwardStepper):
            return None  # they are freed after the step, so no norm is logged
        return super()._get_grad_norm(model, grad_norm)


def _drive(trainer: Any, fitted: Fitted, step: TrainerStep, stack: ExitStack) -> None:
    """Let the Trainer's loop take fitted steps; the undo of each change goes on the stack."""
    plain_class, training = type(trainer), fitted.training
    bases = (FittedSteps,) if plain_class is Trainer else (plain_class, FittedSteps)
    if trainer.accelerator.scaler is not None:
        stepper = ScaledStepper(training.optimizer, training.device, clip_norm=training.stepper.clip_norm)
        stepper.scaler = trainer.accelerator.scaler
        stack.callback(training.replace_stepper(stepper))
    if _mixed(trainer):
        training.applied.insert(0, "autocast")  # the Trainer's own: a proof allows for its rounding
        stack.callback(training.applied.remove, "autocast")
    trainer.fitted_step = step
    stack.callback(trainer.__dict__.pop, "fitted_step")
    trainer.__class__ = type(plain_class.__name__, bases, {})
    stack.callback(setattr, trainer, "__class__", plain_class)
    trainer.optimizer = FittedOptimizer(fitted.optimizer, step.finish)
    stack.callback(setattr, trainer, "optimizer", fitted.optimizer)
    stack.callback(trainer.optimizer.step_hook.remove)
