"""Logs GPU memory per step in the Hugging Face Trainer, wherever that logs.

    trainer = Trainer(...)
    trainer.add_callback(MemoryCallback(trainer))

Works on a real GPU and on a virtual one (`tonnage run`, `tonnage.virtual_gpu`); without either it logs nothing.
"""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tonnage.integrations.steps import StepMemory, StepMeter


class MemoryCallback(TrainerCallback):
    """Logs the step with the highest peak since the last log, at the Trainer's own logging steps.

    It needs the Trainer because callbacks do not receive it, and only `Trainer.log` reaches every logger.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._meter = StepMeter()
        self.latest: StepMemory | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start measuring a step, before its first micro-batch."""
        self._meter.begin()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, **_: Any
    ) -> None:
        self._meter.before_optimizer(model)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Finish measuring a step, after its gradients were freed."""
        self.latest = self._meter.end(model, [optimizer] if optimizer is not None else [])
        if self.latest is not None and control.should_log:
            self._trainer.log(self._meter.take_metrics())
            control.should_log = True  # Trainer.log resets it, and the Trainer would skip its own log
