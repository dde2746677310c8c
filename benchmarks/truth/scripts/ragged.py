"""Train on sequences of different lengths without padding: nested (jagged) tensors, or attention over packed rows."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--way", default="nested", choices=["nested", "varlen"])
p.add_argument("--compile", action="store_true")
p.add_argument("--precision", default="bf16", choices=["bf16", "amp-bf16"])
p.add_argument("--causal", action="store_true")
p.add_argument("--dim", type=int, default=1024)
p.add_argument("--layers", type=int, default=6)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--longest", type=int, default=2048)
args = p.parse_args()
HEADS = 16


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attend(self, y, bounds, longest):
        if args.way == "nested":
            q, k, v = (f(y).unflatten(-1, [HEADS, -1]).transpose(1, 2) for f in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=args.causal).transpose(1, 2).flatten(-2)
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (f(y).unflatten(-1, [HEADS, -1]) for f in (self.q, self.k, self.v))
        extra = dict(window_size=(-1, 0)) if args.causal else {}
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, **extra).flatten(-2)

    def forward(self, x, bounds, longest):
        x = x + self.out(self.attend(self.n1(x), bounds, longest))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32000, args.dim), nn.Linear(args.dim, 32000)
        self.blocks = nn.ModuleList(Block(args.dim) for _ in range(args.layers))

    def forward(self, ids, bounds=None, longest=0):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, bounds, longest)
        return self.head(x)


torch.manual_seed(0)
model = Model().to("cuda", torch.bfloat16 if args.precision == "bf16" else torch.float32)
run = torch.compile(model) if args.compile else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    lengths = torch.randint(args.longest // 8, args.longest + 1, (args.batch,)).tolist()
    rows = [torch.randint(0, 32000, (n,)) for n in lengths]
    with torch.autocast("cuda", torch.bfloat16, enabled=args.precision == "amp-bf16"):
        if args.way == "nested":
            ids = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
            logits, targets = run(ids).values(), ids.values()
        else:
            targets = torch.cat(rows).cuda()
            bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to("cuda", torch.int32)
            logits = run(targets, bounds, max(lengths))
        loss = F.cross_entropy(logits.float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
