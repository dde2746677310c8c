#!/usr/bin/env python
# 3D VAE for volumes, as in medical imaging groups
import argparse
import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


def conv_block(i, o, stride, wn):
    c = nn.Conv3d(i, o, 3, stride=stride, padding=1)
    c = weight_norm(c) if wn == "weight" else spectral_norm(c) if wn == "spectral" else c
    return nn.Sequential(c, nn.InstanceNorm3d(o, affine=True), nn.PReLU(o))


class VAE3D(nn.Module):
    def __init__(self, base=32, z=256, size=96, wn="none"):
        super().__init__()
        chs = [base, base * 2, base * 4, base * 8]
        self.enc = nn.ModuleList()
        i = 1
        for c in chs:
            self.enc.append(nn.Sequential(conv_block(i, c, 2, wn), conv_block(c, c, 1, wn)))
            i = c
        self.s = size // 16
        self.mu, self.logvar = nn.Linear(chs[-1] * self.s**3, z), nn.Linear(chs[-1] * self.s**3, z)
        self.up0 = nn.Linear(z, chs[-1] * self.s**3)
        self.dec = nn.ModuleList()
        for c in chs[-2::-1] + [base]:
            self.dec.append(nn.Sequential(nn.ConvTranspose3d(i, c, 2, stride=2), conv_block(c, c, 1, wn)))
            i = c
        self.out = nn.Conv3d(i, 1, 1)

    def forward(self, x):
        for e in self.enc:
            x = e(x)
        x = x.flatten(1)
        mu, lv = self.mu(x), self.logvar(x)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        y = self.up0(z).view(x.shape[0], -1, self.s, self.s, self.s)
        for d in self.dec:
            y = d(y)
        return self.out(y), mu, lv


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=4)
    ap.add_argument("--size", type=int, default=96)
    ap.add_argument("--base", type=int, default=32)
    ap.add_argument("--norm", default="none")
    ap.add_argument("--amp", action="store_true")
    ap.add_argument("--offload", action="store_true", help="keep saved activations in host memory")
    ap.add_argument("--accum", type=int, default=2)
    args = ap.parse_args()
    torch.manual_seed(42)
    torch.backends.cudnn.benchmark = True
    net = VAE3D(args.base, size=args.size, wn=args.norm).cuda()
    opt = torch.optim.RAdam(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(enabled=args.amp)
    loss_log = []
    for step in range(2 * args.accum):
        vol = torch.rand(args.batch, 1, args.size, args.size, args.size, device="cuda")
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=True) if args.offload else contextlib.nullcontext()
        with hooks, torch.autocast("cuda", torch.float16, enabled=args.amp):
            rec, mu, lv = net(vol)
            kld = -0.5 * torch.mean(1 + lv - mu.pow(2) - lv.exp())
            loss = F.l1_loss(rec, vol) + 1e-3 * kld
            # gradient difference loss
            for dim in (2, 3, 4):
                loss = loss + (rec.diff(dim=dim) - vol.diff(dim=dim)).abs().mean()
        scaler.scale(loss / args.accum).backward()
        if (step + 1) % args.accum == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        loss_log.append(loss.detach())
    print(torch.stack(loss_log).cpu().numpy())
    net.eval()
    with torch.no_grad():
        for _ in range(2):
            net(torch.rand(args.batch * 2, 1, args.size, args.size, args.size, device="cuda"))


if __name__ == "__main__":
    main()
