"""Train a DiT on latent noise. `python dit_train.py --model DiT-B/2 --compile max-autotune-no-cudagraphs`"""

import argparse
from collections import OrderedDict
from copy import deepcopy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SIZES = {
    "DiT-S/2": (12, 384, 6),
    "DiT-B/2": (12, 768, 12),
    "DiT-L/2": (24, 1024, 16),
    "DiT-XL/2": (28, 1152, 16),
    "toy": (2, 64, 2),
}


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, d, f=256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(f, d), nn.SiLU(), nn.Linear(d, d))
        self.f = f

    def forward(self, t):
        freqs = torch.exp(-9.21 * torch.arange(0, self.f // 2, dtype=torch.float32, device=t.device) / (self.f // 2))
        a = t[:, None].float() * freqs[None]
        return self.mlp(torch.cat([a.cos(), a.sin()], -1))


class DiTBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.norm1 = nn.LayerNorm(d, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(d, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

    def forward(self, x, c):
        s1, c1, g1, s2, c2, g2 = self.ada(c).chunk(6, dim=1)
        B, N, D = x.shape
        q, k, v = (
            self.qkv(modulate(self.norm1(x), s1, c1))
            .reshape(B, N, 3, self.h, D // self.h)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D)
        x = x + g1.unsqueeze(1) * self.proj(a)
        return x + g2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), s2, c2))


class DiT(nn.Module):
    def __init__(self, depth, d, heads, latent=32, patch=2, ckpt=False):
        super().__init__()
        self.ckpt, self.patch, self.latent = ckpt, patch, latent
        self.x_embed = nn.Conv2d(4, d, patch, patch)
        self.pos = nn.Parameter(torch.randn(1, (latent // patch) ** 2, d) * 0.02, requires_grad=False)
        self.t_embed, self.y_embed = TimestepEmbedder(d), nn.Embedding(1001, d)
        self.blocks = nn.ModuleList([DiTBlock(d, heads) for _ in range(depth)])
        self.final = nn.Linear(d, patch * patch * 8)

    def forward(self, x, t, y):
        x = self.x_embed(x).flatten(2).transpose(1, 2) + self.pos
        c = self.t_embed(t) + self.y_embed(y)
        for b in self.blocks:
            x = checkpoint(b, x, c, use_reentrant=False) if self.ckpt else b(x, c)
        x = self.final(x)
        g = self.latent // self.patch
        x = x.reshape(x.shape[0], g, g, self.patch, self.patch, 8)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 8, self.latent, self.latent)


@torch.no_grad()
def update_ema(ema, model, decay=0.9999):
    e, m = OrderedDict(ema.named_parameters()), OrderedDict(model.named_parameters())
    for name, p in m.items():
        e[name.replace("_orig_mod.", "")].mul_(decay).add_(p.data, alpha=1 - decay)


def main(a):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda"
    model = DiT(*SIZES[a.model], ckpt=a.ckpt).to(device)
    ema = deepcopy(model).to(device)
    for p in ema.parameters():
        p.requires_grad = False
    if a.compile:
        model = torch.compile(model, mode=None if a.compile == "default" else a.compile)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0).float().to(device)
    update_ema(ema, model, decay=0)
    model.train()
    ema.eval()
    running = 0
    for step in range(a.steps):
        x = torch.randn(a.batch, 4, 32, 32).to(device)
        y = torch.randint(0, 1000, (a.batch,)).to(device)
        y = torch.where(torch.rand(a.batch, device=device) < 0.1, torch.full_like(y, 1000), y)
        t = torch.randint(0, 1000, (a.batch,), device=device)
        noise = torch.randn_like(x)
        ab = abar[t].view(-1, 1, 1, 1)
        xt = ab.sqrt() * x + (1 - ab).sqrt() * noise
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not a.fp32):
            eps, _ = model(xt, t, y).chunk(2, 1)
        loss = F.mse_loss(eps.float(), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(ema, model)
        running += loss.item()
    print("train", running / a.steps)
    if a.sample:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            z = torch.randn(a.sample, 4, 32, 32, device=device)
            z, y = (
                torch.cat([z, z]),
                torch.cat([torch.arange(a.sample), torch.full((a.sample,), 1000)]).to(device) % 1001,
            )
            for i in reversed(range(0, 1000, 100)):
                e = ema(z, torch.full((len(z),), i, device=device), y)[:, :4]
                ce, ue = e.chunk(2)
                e = ue + 4.0 * (ce - ue)
                z = (z - 0.1 * torch.cat([e, e])) / 0.99
        print("sampled", z.float().std().item())


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="DiT-B/2", choices=SIZES)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--steps", type=int, default=4)
    ap.add_argument("--compile", default="")
    ap.add_argument("--ckpt", action="store_true")
    ap.add_argument("--fp32", action="store_true")
    ap.add_argument("--sample", type=int, default=0)
    main(ap.parse_args())
