"""Ways to keep fewer activations: checkpoints of both kinds, offload, compressed saved tensors, reversible blocks."""

import argparse
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class PreNorm(nn.Module):
    def __init__(self, d, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(d), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class SelfAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.mha = nn.MultiheadAttention(d, heads, batch_first=True, dropout=0.1)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.f = PreNorm(d, SelfAttention(d, heads))
        self.g = PreNorm(d, nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * d, d)))

    def forward(self, x):
        x = x + self.f(x)
        return x + self.g(x)


class ReversibleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1, x2, blocks, *params):
        ctx.blocks = blocks
        with torch.no_grad():
            for b in blocks:
                x1 = x1 + b.f(x2)
                x2 = x2 + b.g(x1)
        ctx.y1, ctx.y2 = x1.detach(), x2.detach()
        return x1, x2

    @staticmethod
    def backward(ctx, d1, d2):
        y1, y2 = ctx.y1, ctx.y2
        for b in reversed(ctx.blocks):
            with torch.enable_grad():
                y1.requires_grad_(True)
                gy = b.g(y1)
                gy.backward(d2)
            with torch.no_grad():
                x2 = y2 - gy
                d1 = d1 + y1.grad
                y1.grad = None
            with torch.enable_grad():
                x2.requires_grad_(True)
                fx = b.f(x2)
                fx.backward(d1)
            with torch.no_grad():
                y1, y2 = (y1 - fx).detach(), x2.detach()
                d2 = d2 + x2.grad
                x2.grad = None
        return d1, d2, None, *[None for b in ctx.blocks for _ in b.parameters()]


def pack_int8(t):
    if t.dtype != torch.float32 or t.numel() < 1_000_000 or isinstance(t, nn.Parameter):
        return t
    s = t.abs().amax() / 127 + 1e-12
    return (t / s).round().to(torch.int8), s, t.requires_grad


def unpack_int8(p):
    return p if isinstance(p, torch.Tensor) else p[0].float() * p[1]


class Net(nn.Module):
    def __init__(self, d, heads, n, way):
        super().__init__()
        self.inp = nn.Linear(64, d)
        self.blocks = nn.Sequential(*[Block(d, heads) for _ in range(n)])
        self.out = nn.Linear(d, 64)
        self.way = way

    def forward(self, x):
        x = self.inp(x)
        if self.way == "sequential":
            x = checkpoint_sequential(self.blocks, 4, x, use_reentrant=False)
        elif self.way in ("reentrant", "nonreentrant"):
            for b in self.blocks:
                x = checkpoint(b, x, use_reentrant=self.way == "reentrant")
        elif self.way == "every-other":
            for i, b in enumerate(self.blocks):
                x = checkpoint(b, x, use_reentrant=False, preserve_rng_state=False) if i % 2 else b(x)
        elif self.way == "reversible":
            params = [p for b in self.blocks for p in b.parameters()]
            x1, x2 = ReversibleFunction.apply(x, x.clone(), list(self.blocks), *params)
            x = x1 + x2
        else:
            x = self.blocks(x)
        return self.out(x)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument(
        "way",
        choices=["none", "sequential", "reentrant", "nonreentrant", "every-other", "offload", "int8", "reversible"],
    )
    ap.add_argument("--d", type=int, default=768)
    ap.add_argument("--n", type=int, default=12)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--seq", type=int, default=1024)
    ap.add_argument("--compile", action="store_true")
    a = ap.parse_args()
    torch.manual_seed(0)
    net = Net(a.d, 12, a.n, a.way).cuda()
    run = torch.compile(net) if a.compile else net
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for step in range(3):
        x = torch.randn(a.batch, a.seq, 64, device="cuda")
        ctx = contextlib.nullcontext()
        if a.way == "offload":
            ctx = torch.autograd.graph.save_on_cpu(pin_memory=False)
        elif a.way == "int8":
            ctx = torch.autograd.graph.saved_tensors_hooks(pack_int8, unpack_int8)
        with ctx:
            loss = F.mse_loss(run(x)[:, :-1], x[:, 1:])
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(step, loss.item())
