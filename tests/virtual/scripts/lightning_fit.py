"""PyTorch Lightning's trainer on the GPU."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 10))

    def training_step(self, batch, index):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.net(features), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = TensorDataset(torch.randn(64, 128), torch.randint(0, 10, (64,)))
trainer = lightning.Trainer(
    max_epochs=1, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False
)
trainer.fit(Classifier(), DataLoader(data, batch_size=16))
print("steps", trainer.global_step)
