"""Speedrun-like GPT: Muon for the matrices, fused Adam for the rest, compiled Newton-Schulz."""

import os
import sys
import torch
from torch import nn
import torch.nn.functional as F

FLAGS = set(sys.argv[1:])
BATCH = int(os.environ.get("BATCH", 16))
SEQ = int(os.environ.get("SEQ", 1024))
ACCUM = 2
torch.manual_seed(1337)
torch.set_float32_matmul_precision("high")


def zeropower_via_newtonschulz5(G, steps=5):
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    return X.mT if G.size(-2) > G.size(-1) else X


if "ns-compile" in FLAGS:
    zeropower_via_newtonschulz5 = torch.compile(zeropower_via_newtonschulz5, dynamic=False)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                st = self.state[p]
                if "buf" not in st:
                    st["buf"] = torch.zeros_like(p.grad)
                st["buf"].lerp_(p.grad, 1 - g["momentum"])
                u = zeropower_via_newtonschulz5(p.grad.lerp_(st["buf"], g["momentum"]))
                p.add_(u.to(p.dtype), alpha=-g["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)


class Rotary(nn.Module):
    def __init__(self, dim, T):
        super().__init__()
        f = (1 / 1024) ** torch.linspace(0, 1, dim // 2)
        th = torch.outer(torch.arange(T), f)
        self.register_buffer("cos", th.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", th.sin()[None, :, None], persistent=False)

    def forward(self, x):
        x1, x2 = x.float().chunk(2, -1)
        c, s = self.cos[:, : x.size(1)], self.sin[:, : x.size(1)]
        return torch.cat((x1 * c + x2 * s, -x1 * s + x2 * c), -1).type_as(x)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkvw = nn.Parameter(torch.randn(3 * d, d) * d**-0.5)
        self.proj = nn.Linear(d, d, bias=False)
        self.rot = Rotary(d // h, SEQ)
        self.fc, self.fc2 = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        B, T, D = x.shape
        y = F.rms_norm(x, (D,))
        q, k, v = F.linear(y, self.qkvw.type_as(y)).view(B, T, 3 * self.h, -1).chunk(3, dim=2)
        q, k = self.rot(F.rms_norm(q, (q.size(-1),))), self.rot(F.rms_norm(k, (k.size(-1),)))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.fc2(F.relu(self.fc(F.rms_norm(x, (D,)))).square())


class GPT(nn.Module):
    def __init__(self, V=50304, d=768, layers=12, h=6):
        super().__init__()
        self.embed = nn.Embedding(V, d).bfloat16()
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(layers))
        self.skip = nn.Parameter(torch.ones(layers // 2))
        self.lm_head = nn.Linear(d, V, bias=False)
        nn.init.zeros_(self.lm_head.weight)

    def forward(self, ids, target):
        x = x0 = F.rms_norm(self.embed(ids), (self.embed.weight.size(1),))
        skips, n = [], len(self.blocks) // 2
        for i, b in enumerate(self.blocks):
            if i < n:
                skips.append(x)
            else:
                x = x + self.skip[i - n] * skips.pop()
            x = b(x, x0)
        logits = self.lm_head(F.rms_norm(x, (x.size(-1),)))
        logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), target.view(-1))


model = GPT(layers=int(os.environ.get("LAYERS", 12))).cuda()
for m in model.modules():
    if isinstance(m, nn.Linear):
        m.bfloat16()
matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "blocks" in n)]
run = torch.compile(model) if "compile" in FLAGS else model
opts = [
    Muon(matrices),
    torch.optim.Adam(
        others, lr=3e-3, betas=(0.8, 0.95), fused="opt-compile" not in FLAGS, capturable="opt-compile" in FLAGS
    ),
]


def adam_step():
    opts[1].step()


if "opt-compile" in FLAGS:
    adam_step = torch.compile(adam_step, fullgraph=False)

for step in range(4):
    for _ in range(ACCUM):
        ids = torch.randint(0, 50257, (BATCH, SEQ + 1)).cuda()
        loss = run(ids[:, :-1], ids[:, 1:]) / ACCUM
        loss.backward()
    opts[0].step()
    adam_step()
    model.zero_grad(set_to_none=True)
    print(step, loss.item() * ACCUM)
