"""A convolutional autoencoder under many optimizers."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--optimizer", default="Adagrad")
p.add_argument("--batch", type=int, default=64)
p.add_argument("--ema", action="store_true")
args = p.parse_args()


class Autoencoder(nn.Module):
    def __init__(self, w=64):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, w, 3, 2, 1), nn.Conv2d(w, 2 * w, 3, 2, 1), nn.Conv2d(2 * w, 4 * w, 3, 2, 1)])
        self.mean, self.spread = nn.Linear(4 * w * 256, 512), nn.Linear(4 * w * 256, 512)
        self.back = nn.Linear(512, 4 * w * 256)
        self.up = nn.ModuleList([nn.Conv2d(4 * w, 2 * w, 3, 1, 1), nn.Conv2d(2 * w, w, 3, 1, 1), nn.Conv2d(w, 3, 3, 1, 1)])

    def forward(self, x):
        y = x
        for conv in self.down:
            y = F.silu(conv(y))
        flat = y.flatten(1)
        mean, spread = self.mean(flat), self.spread(flat)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        y = self.back(z).view_as(y)
        for conv in self.up:
            y = conv(F.interpolate(F.silu(y), scale_factor=2, mode="bilinear", align_corners=False))
        divergence = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1).mean()
        return F.mse_loss(torch.sigmoid(y), x) + 1e-3 * divergence


model = Autoencoder().cuda()
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)) if args.ema else None
kind = getattr(torch.optim, args.optimizer)
optimizer = kind(model.parameters(), lr=1e-3)
for step in range(3):
    images = torch.rand(args.batch, 3, 128, 128, device="cuda")

    def closure():
        optimizer.zero_grad()
        loss = model(images)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    if average is not None:
        average.update_parameters(model)
    print(step, float(loss))
