"""Train with Triton kernels of one's own: RMS norm, fused softmax and a gated activation, each with its backward."""
import argparse

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn


@triton.jit
def rms_forward(x, w, y, rstd, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    v = tl.load(x + row * n + cols, mask=mask, other=0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(v * v) / n + eps)
    tl.store(rstd + row, r)
    tl.store(y + row * n + cols, v * r * tl.load(w + cols, mask=mask), mask=mask)


@triton.jit
def rms_backward(x, w, dy, dx, dw, rstd, rows, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    weight = tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
    partial = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        v = tl.load(x + row * n + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + row * n + cols, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(rstd + row)
        wg = weight * g
        tl.store(dx + row * n + cols, r * (wg - v * r * r * tl.sum(wg * v) / n), mask=mask)
        partial += g * v * r
    tl.store(dw + tl.program_id(0) * n + cols, partial, mask=mask)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        flat = x.reshape(-1, x.shape[-1])
        y, rstd = torch.empty_like(flat), torch.empty(len(flat), device=x.device)
        rms_forward[(len(flat),)](flat, w, y, rstd, flat.shape[1], 1e-6, BLOCK=triton.next_power_of_2(flat.shape[1]), num_warps=8)
        ctx.save_for_backward(flat, w, rstd)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
        dx, dw = torch.empty_like(x), torch.empty(programs, x.shape[1], device=x.device)
        rms_backward[(programs,)](x, w, dy.reshape(x.shape).contiguous(), dx, dw, rstd, *x.shape,
                                  BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
        return dx.view_as(dy), dw.sum(0).to(w.dtype)


@triton.jit
def softmax_forward(x, n, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v))
    tl.store(x + row * n + cols, e / tl.sum(e), mask=cols < n)


@triton.jit
def softmax_backward(y, dy, n, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(y + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
    g = tl.load(dy + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
    tl.store(dy + row * n + cols, v * (g - tl.sum(v * g)), mask=cols < n)


class Softmax(torch.autograd.Function):
    """Softmax in place of its input; the gradient is written over the one that came."""

    @staticmethod
    def forward(ctx, x):
        rows = x.numel() // x.shape[-1]
        softmax_forward[(rows,)](x, x.shape[-1], BLOCK=triton.next_power_of_2(x.shape[-1]))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dy = dy.contiguous()
        softmax_backward[(dy.numel() // dy.shape[-1],)](y, dy, dy.shape[-1], BLOCK=triton.next_power_of_2(dy.shape[-1]))
        return dy


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (512, 1024, 2048) for warps in (4, 8)]


@triton.jit
def gate_plain(a, b, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(a + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y + i, u * tl.sigmoid(u) * tl.load(b + i, mask=i < n, other=0.0).to(tl.float32), mask=i < n)


gate_tuned = triton.autotune(configs=CONFIGS, key=["n"])(gate_plain)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, tuned):
        y = torch.empty_like(a)
        n = a.numel()
        if tuned:
            gate_tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](a, b, y, n)
        else:
            gate_plain[(triton.cdiv(n, 1024),)](a, b, y, n, BLOCK=1024)
        ctx.save_for_backward(a, b)
        return y

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return dy * b * s * (1 + a * (1 - s)), dy * a * s, None


class Block(nn.Module):
    def __init__(self, dim, heads, tuned):
        super().__init__()
        self.heads, self.tuned = heads, tuned
        self.w1, self.w2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.gate, self.down = (nn.Linear(a, b, bias=False) for a, b in ((dim, 3 * dim), (dim, 3 * dim), (3 * dim, dim)))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(RMSNorm.apply(x, self.w1)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = Softmax.apply(q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5) @ v
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        y = RMSNorm.apply(x, self.w2)
        return x + self.down(Gate.apply(self.gate(y), self.up(y), self.tuned))


p = argparse.ArgumentParser()
p.add_argument("--autotune", action="store_true")
p.add_argument("--dim", type=int, default=1024)
p.add_argument("--layers", type=int, default=6)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32000, args.dim), *(Block(args.dim, 16, args.autotune) for _ in range(args.layers)),
                      nn.Linear(args.dim, 32000, bias=False)).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
