"""A convolutional autoencoder with Lightning."""

import lightning
import torch
from switches import applied
from torch import nn
from torch.utils.data import DataLoader

args = applied(batch=48, width=64)


def stage(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.GELU(),
        nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.GELU(),
    )  # fmt: skip


class AutoEncoder(lightning.LightningModule):
    def __init__(self, w):
        super().__init__()
        self.down = nn.ModuleList([stage(3, w), stage(w, 2 * w), stage(2 * w, 4 * w)])
        self.up = nn.ModuleList([stage(4 * w, 2 * w), stage(2 * w, w)])
        self.last = nn.Conv2d(w, 3, 3, padding=1)

    def training_step(self, batch, _):
        x = batch
        for part in self.down:
            x = nn.functional.max_pool2d(self.through(part, x), 2)
        for part in self.up:
            x = nn.functional.interpolate(self.through(part, x), scale_factor=2)
        return nn.functional.mse_loss(nn.functional.interpolate(self.last(x), scale_factor=2), batch)

    def through(self, part, x):
        if args.apply == "checkpoint":
            return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        return part(x)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True if args.apply == "fused" else None)


half = args.apply == "batch"
loader = DataLoader([torch.zeros(3, 128, 128)] * args.batch * 3, batch_size=args.batch // 2 if half else args.batch)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
    accumulate_grad_batches=2 if half else 1, precision="bf16-mixed" if args.apply == "autocast" else "32-true",
)  # fmt: skip
trainer.fit(AutoEncoder(args.width), loader)
