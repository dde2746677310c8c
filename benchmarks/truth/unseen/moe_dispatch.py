"""Switch/top-k MoE transformer with sort + bincount dispatch. Research prototype."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

P = argparse.ArgumentParser()
P.add_argument("--d", type=int, default=1024)
P.add_argument("--experts", type=int, default=16)
P.add_argument("--k", type=int, default=2)
P.add_argument("--layers", type=int, default=6)
P.add_argument("--bs", type=int, default=16)
P.add_argument("--seq", type=int, default=1024)
P.add_argument("--dispatch", choices=["sort", "capacity", "dense"], default="sort")
P.add_argument("--remat", action="store_true")
P.add_argument("--compile", action="store_true")
cfg = P.parse_args()
torch.manual_seed(11)


class Experts(nn.Module):
    def __init__(self, n, d, hidden):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(n, d, hidden) / math.sqrt(d))
        self.w2 = nn.Parameter(torch.randn(n, hidden, d) / math.sqrt(hidden))

    def one(self, e, x):
        return F.gelu(x @ self.w1[e]) @ self.w2[e]

    def all(self, x):  # [n, cap, d]
        return torch.bmm(F.gelu(torch.bmm(x, self.w1)), self.w2)


class MoE(nn.Module):
    def __init__(self, d, n, k):
        super().__init__()
        self.n, self.k = n, k
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = Experts(n, d, 4 * d)
        self.aux = 0.0

    def forward(self, x):
        B, T, D = x.shape
        x = x.reshape(-1, D)
        probs = self.gate(x.float()).softmax(-1, dtype=torch.float32)
        w, sel = probs.topk(self.k, -1)
        w = w / w.sum(-1, keepdim=True)
        load = torch.zeros(self.n, device=x.device).index_add_(0, sel.flatten(), torch.ones_like(w).flatten())
        self.aux = (probs.mean(0) * load / load.sum()).sum() * self.n
        if cfg.dispatch == "sort":
            flat = sel.flatten()
            order = flat.argsort(stable=True)
            counts = torch.bincount(flat, minlength=self.n).tolist()
            tok = order // self.k
            outs = []
            for e, chunk in enumerate(x[tok].split(counts)):
                if chunk.shape[0]:
                    outs.append(self.experts.one(e, chunk))
            y = torch.cat(outs) * w.flatten()[order, None].to(x.dtype)
            out = torch.zeros_like(x).index_add_(0, tok, y.to(x.dtype))
        elif cfg.dispatch == "capacity":
            cap = int(1.25 * x.shape[0] * self.k / self.n)
            onehot = F.one_hot(sel.flatten(), self.n)
            pos = (onehot.cumsum(0) - 1).gather(1, sel.flatten()[:, None]).squeeze(1)
            keep = pos < cap
            slot = torch.where(keep, sel.flatten() * cap + pos, torch.full_like(pos, self.n * cap))
            rep = x.repeat_interleave(self.k, 0)
            buf = x.new_zeros(self.n * cap + 1, D).index_copy(0, slot, rep)
            y = self.experts.all(buf[:-1].view(self.n, cap, D)).reshape(-1, D)
            y = torch.cat([y, y.new_zeros(1, D)])[slot] * w.flatten()[:, None].to(y.dtype)
            out = y.view(-1, self.k, D).sum(1)
        else:
            full = torch.zeros_like(probs).scatter(1, sel, w)
            y = torch.einsum("td,edh->teh", x, self.experts.w1)
            out = torch.einsum("teh,ehd,te->td", F.gelu(y), self.experts.w2, full.to(y.dtype))
        return out.view(B, T, D)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.moe = MoE(d, cfg.experts, cfg.k)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, D // 64, 64).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        x = x + self.moe(self.n2(x))
        return x, self.moe.aux


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(32000, cfg.d)
        self.blocks = nn.ModuleList(Block(cfg.d) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.d, 32000, bias=False)

    def forward(self, idx):
        x, aux = self.emb(idx), 0
        for b in self.blocks:
            x, a = checkpoint(b, x, use_reentrant=False) if cfg.remat else b(x)
            aux = aux + a
        return self.head(x), aux


with torch.device("cuda"):
    model = LM()
if cfg.compile:
    for i in range(len(model.blocks)):
        model.blocks[i] = torch.compile(model.blocks[i])
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(3):
    ids = torch.randint(0, 32000, (cfg.bs, cfg.seq + 1)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits, aux = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * aux
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, float(loss))
