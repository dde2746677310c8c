"""Train a transformer on xformers: its attention under several masks, its SwiGLU, and its unbind of packed projections."""
import argparse

import torch
import torch.nn.functional as F
import xformers.ops as xops
from torch import nn
from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

p = argparse.ArgumentParser()
p.add_argument("--mask", default="causal", choices=["causal", "none", "bias", "documents"])
p.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "amp-bf16"])
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--separate", action="store_true", help="project queries, keys and values apart")
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=2048)
p.add_argument("--heads", type=int, default=16)
p.add_argument("--size", type=int, default=64, help="of a head")
p.add_argument("--layers", type=int, default=6)
args = p.parse_args()
width = args.heads * args.size


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if args.separate:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        else:
            self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = xops.SwiGLU(width, 8 * width // 3 // 64 * 64, width)

    def forward(self, x, mask):
        b, t, c = x.shape
        y = self.n1(x)
        if args.separate:
            q, k, v = (f(y).view(b, t, args.heads, args.size) for f in (self.q, self.k, self.v))
        else:
            q, k, v = xops.unbind(self.qkv(y).view(b, t, 3, args.heads, args.size), 2)
        y = xops.memory_efficient_attention(q, k, v, attn_bias=mask, p=args.dropout)
        x = x + self.out(y.reshape(b, t, c))
        return x + self.feed(self.n2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32000, width), nn.Linear(width, 32000, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))

    def forward(self, ids, mask):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


torch.manual_seed(0)
model = Model().to("cuda", torch.bfloat16 if args.precision == "bf16" else torch.float32)
kind = torch.float32 if args.precision == "fp32" else torch.bfloat16
mask, shape = None, (args.batch, args.seq)
if args.mask == "causal":
    mask = xops.LowerTriangularMask()
elif args.mask == "bias":
    mask = nn.Parameter(torch.zeros(1, args.heads, args.seq, args.seq, device="cuda", dtype=kind)).expand(args.batch, -1, -1, -1)
elif args.mask == "documents":
    lengths = [args.seq // 4, args.seq, args.seq // 2, args.seq // 4] * (args.batch // 2)
    mask, shape = BlockDiagonalCausalMask.from_seqlens(lengths), (1, sum(lengths))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    ids = torch.randint(0, 32000, shape, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=args.precision == "amp-bf16"):
        logits = model(ids, mask)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
