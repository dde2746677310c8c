"""Lightning under torchrun, with its FSDP strategy."""

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy
from small_model import Block, Network, batches, loss_of


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = None

    def configure_model(self):
        self.network = self.network or Network()

    def training_step(self, batch, _):
        loss = loss_of(self.network, batch[0])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = lightning.Trainer(
    accelerator="cuda",
    devices=2,
    strategy=FSDPStrategy(auto_wrap_policy={Block}),
    max_steps=2,
    precision="bf16-mixed",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), batches())
print("world", trainer.world_size)
