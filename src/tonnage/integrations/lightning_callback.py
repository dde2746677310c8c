"""Logs GPU memory per step in Lightning, to every logger of the Trainer.

    trainer = lightning.Trainer(callbacks=[MemoryCallback()])

Works on a real GPU and on a virtual one (`tonnage run`, `tonnage.virtual_gpu`); without either it logs nothing.
"""

import sys
from typing import TYPE_CHECKING, Any

from tonnage.integrations.steps import StepMemory, StepMeter

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
    from lightning.pytorch.callbacks import Callback
else:
    from pytorch_lightning.callbacks import Callback


class MemoryCallback(Callback):
    """Logs the step with the highest peak since the last log, every `log_every_n_steps` of the Trainer.

    It writes to the loggers directly: `log_dict` would move each number to the GPU and back, which synchronizes.
    """

    def __init__(self) -> None:
        self._meter = StepMeter()
        self.latest: StepMemory | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._meter.begin()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._meter.before_optimizer(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.latest = self._meter.end(pl_module, trainer.optimizers)
        every = trainer.log_every_n_steps
        if self.latest is not None and every and (batch_idx + 1) % every == 0:
            metrics = self._meter.take_metrics()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
