try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse
import copy

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n, lr_size, scale):
        self.n, self.s, self.k = n, lr_size, scale

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.rand(3, self.s, self.s, generator=g), torch.rand(3, self.s * self.k, self.s * self.k, generator=g)


class RCAB(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(f, f, 3, 1, 1), nn.ReLU(True), nn.Conv2d(f, f, 3, 1, 1))
        self.att = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(f, f // 16, 1), nn.ReLU(True), nn.Conv2d(f // 16, f, 1), nn.Sigmoid()
        )

    def forward(self, x):
        r = self.body(x)
        return x + r * self.att(r)


class SuperRes(L.LightningModule):
    def __init__(self, f=64, blocks=20, scale=4, manual=False, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.head = nn.Conv2d(3, f, 3, 1, 1)
        self.body = nn.Sequential(*[RCAB(f) for _ in range(blocks)])
        self.tail = nn.Sequential(nn.Conv2d(f, f * scale**2, 3, 1, 1), nn.PixelShuffle(scale), nn.Conv2d(f, 3, 3, 1, 1))
        self.disc = (
            nn.Sequential(
                nn.Conv2d(3, 64, 4, 2, 1),
                nn.LeakyReLU(0.2, True),
                nn.Conv2d(64, 128, 4, 2, 1),
                nn.LeakyReLU(0.2, True),
                nn.Conv2d(128, 256, 4, 2, 1),
                nn.LeakyReLU(0.2, True),
                nn.Conv2d(256, 1, 3, 1, 1),
            )
            if manual
            else None
        )
        self.automatic_optimization = not manual

    def forward(self, x):
        h = self.head(x)
        return self.tail(h + self.body(h))

    def training_step(self, batch, idx):
        x, y = batch
        if self.automatic_optimization:
            loss = nn.functional.l1_loss(self(x), y)
            self.log("l1", loss, prog_bar=True)
            return loss
        og, od = self.optimizers()
        self.toggle_optimizer(og)
        fake = self(x)
        g = nn.functional.l1_loss(fake, y) + 1e-3 * nn.functional.softplus(-self.disc(fake)).mean()
        og.zero_grad()
        self.manual_backward(g)
        og.step()
        self.untoggle_optimizer(og)
        self.toggle_optimizer(od)
        d = nn.functional.softplus(-self.disc(y)).mean() + nn.functional.softplus(self.disc(fake.detach())).mean()
        od.zero_grad()
        self.manual_backward(d)
        od.step()
        self.untoggle_optimizer(od)
        self.log_dict({"g": g, "d": d})

    def validation_step(self, batch, idx):
        x, y = batch
        self.log("psnr", -10 * torch.log10(nn.functional.mse_loss(self(x), y)))

    def configure_optimizers(self):
        gen = [*self.head.parameters(), *self.body.parameters(), *self.tail.parameters()]
        g = torch.optim.Adam(gen, lr=self.hparams.lr)
        if self.hparams.manual:
            return [g, torch.optim.Adam(self.disc.parameters(), lr=self.hparams.lr)]
        return {"optimizer": g, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(g, 10)}


class EMA(Callback):
    def on_fit_start(self, trainer, module):
        self.shadow = copy.deepcopy(module.state_dict())

    def on_train_batch_end(self, trainer, module, *_):
        for k, v in module.state_dict().items():
            self.shadow[k] = self.shadow[k] * 0.999 + v * 0.001

    def on_validation_start(self, trainer, module):
        self.backup = copy.deepcopy(module.state_dict())
        module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, module):
        module.load_state_dict(self.backup)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--size", type=int, default=64)
    p.add_argument("--precision", default="16-mixed")
    p.add_argument("--manual", action="store_true")
    p.add_argument("--accumulate", type=int, default=1)
    a = p.parse_args()
    L.seed_everything(1)
    data = Pairs(a.batch * 6, a.size, 4)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        precision=a.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[EMA()],
        accumulate_grad_batches=a.accumulate,
        gradient_clip_val=None if a.manual else 0.5,
        benchmark=True,
    )
    trainer.fit(
        SuperRes(manual=a.manual),
        DataLoader(data, a.batch, shuffle=True, pin_memory=True),
        DataLoader(Pairs(a.batch * 2, a.size, 4), a.batch * 2),
    )
