"""Serve an encoder exported in several ways, with requests put into buckets."""

import argparse
import random

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, d=1024, heads=16, layers=12, vocab=30522):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(1024, d)
        self.layers = nn.ModuleList([Layer(d, heads) for _ in range(layers)])
        self.pool = nn.Linear(d, 256)

    def forward(self, ids, mask):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        m = mask.unsqueeze(-1).to(x.dtype)
        return nn.functional.normalize(self.pool((x * m).sum(1) / m.sum(1)), dim=-1)


class Layer(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x, bias):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        att = torch.softmax(q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5) + bias, -1)
        y = (att @ v).transpose(1, 2).reshape(x.shape)
        x = self.ln1(x + self.o(y))
        return self.ln2(x + self.fc2(nn.functional.gelu(self.fc1(x))))


def requests(n, longest, seed=4):
    rng = random.Random(seed)
    return [rng.randint(8, longest) for _ in range(n)]


ap = argparse.ArgumentParser()
ap.add_argument("--how", default="eager", choices=["eager", "trace", "script", "export", "compile-dynamic", "compile"])
ap.add_argument("--max-batch", type=int, default=128)
ap.add_argument("--longest", type=int, default=512)
ap.add_argument("--requests", type=int, default=2000)
ap.add_argument("--layers", type=int, default=12)
ap.add_argument("--half", action="store_true")
args = ap.parse_args()
torch.manual_seed(0)
model = Encoder(layers=args.layers).eval().cuda()
if args.half:
    model = model.half()
for p in model.parameters():
    p.requires_grad_(False)
sample = (torch.randint(0, 30000, (4, 32)).cuda(), torch.ones(4, 32, dtype=torch.long).cuda())
if args.how == "trace":
    fn = torch.jit.freeze(torch.jit.trace(model, sample, check_trace=False))
elif args.how == "script":
    fn = torch.jit.script(model)
elif args.how == "export":
    b, t = torch.export.Dim("b", min=2, max=512), torch.export.Dim("t", min=2, max=1024)
    fn = torch.export.export(model, sample, dynamic_shapes=({0: b, 1: t}, {0: b, 1: t})).module()
elif args.how == "compile-dynamic":
    fn = torch.compile(model, dynamic=True)
elif args.how == "compile":
    fn = torch.compile(model)
else:
    fn = model

lengths = sorted(requests(args.requests, args.longest))
index, i = [], 0
with torch.inference_mode() if args.how in ("eager", "compile") else torch.no_grad():
    while i < len(lengths):
        group = lengths[i : i + args.max_batch]
        width = -(-group[-1] // 64) * 64
        ids = torch.randint(0, 30000, (len(group), width))
        mask = (torch.arange(width)[None] < torch.tensor(group)[:, None]).long()
        index.append(fn(ids.cuda(non_blocking=True), mask.cuda(non_blocking=True)).float())
        i += len(group)
    index = torch.cat(index)
    sim = index @ index.T
    sim.fill_diagonal_(-1)
    print(index.shape, sim.topk(10, dim=1).values.mean().item())
