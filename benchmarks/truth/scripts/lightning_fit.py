"""Lightning's Trainer on a small convolutional autoencoder with validation."""
import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--precision", default="32-true")
p.add_argument("--batch", type=int, default=48)
p.add_argument("--width", type=int, default=64)
p.add_argument("--accumulate", type=int, default=1)
args = p.parse_args()


class AutoEncoder(L.LightningModule):
    def __init__(self, w):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, w, 4, 2, 1), nn.GELU(), nn.Conv2d(w, 2 * w, 4, 2, 1), nn.BatchNorm2d(2 * w),
                                     nn.GELU(), nn.Conv2d(2 * w, 4 * w, 4, 2, 1), nn.GroupNorm(8, 4 * w), nn.SiLU())
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4 * w, 2 * w, 4, 2, 1), nn.BatchNorm2d(2 * w), nn.GELU(),
                                     nn.ConvTranspose2d(2 * w, w, 4, 2, 1), nn.GELU(), nn.Upsample(scale_factor=2, mode="bilinear"),
                                     nn.Conv2d(w, 3, 3, padding=1))

    def training_step(self, batch, _):
        x = batch[0]
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val", nn.functional.l1_loss(self.decoder(self.encoder(batch[0])), batch[0]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)}


pictures = torch.randn(args.batch * 5, 3, 128, 128)
loader = DataLoader(TensorDataset(pictures), batch_size=args.batch, num_workers=0)
trainer = L.Trainer(max_epochs=2, accelerator="gpu", devices=1, precision=args.precision, logger=False, enable_checkpointing=False,
                    accumulate_grad_batches=args.accumulate, gradient_clip_val=1.0, enable_model_summary=False)
trainer.fit(AutoEncoder(args.width), loader, loader)
