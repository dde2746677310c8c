"""Generate with grouped heads on xformers: prompts packed into one row, a padded cache, rotary positions, RMS norms."""
import argparse

import torch
import xformers.ops as xops
from torch import nn
from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask

p = argparse.ArgumentParser()
p.add_argument("--requests", type=int, default=16)
p.add_argument("--prompt", type=int, default=1000)
p.add_argument("--tokens", type=int, default=8)
p.add_argument("--context", type=int, default=4096, help="of the cache, a request")
p.add_argument("--groups", type=int, default=4, help="query heads that share a key head")
p.add_argument("--heads", type=int, default=32)
p.add_argument("--layers", type=int, default=8)
args = p.parse_args()
size, width, shared = 128, 128 * args.heads, args.heads // args.groups


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = xops.RMSNorm(width), xops.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * shared * size, bias=False)
        self.feed = xops.SwiGLU(width, 11 * width // 4, width, bias=False)

    def forward(self, x, mask, keys, values):
        total = x.shape[0]
        y = self.n1(x)
        q = self.q(y).view(1, total, shared, args.groups, size)
        k, v = self.kv(y).view(1, total, 2, shared, 1, size).expand(-1, -1, -1, -1, args.groups, -1).unbind(2)
        q = xops.rope_padded(q, k, v, keys, values, mask)
        y = xops.memory_efficient_attention_forward(q, keys, values, attn_bias=mask)
        x = x + self.out(y.reshape(total, width))
        return x + self.feed(self.n2(x))


torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"), torch.no_grad():
    embed, head = nn.Embedding(32000, width), nn.Linear(width, 32000, bias=False)
    blocks = nn.ModuleList(Block() for _ in range(args.layers))
    caches = [[torch.zeros(1, args.requests * args.context, shared, 1, size).expand(-1, -1, -1, args.groups, -1) for _ in range(2)]
              for _ in blocks]
    lengths = [args.prompt + 8 * i for i in range(args.requests)]
    ids = torch.randint(0, 32000, (sum(lengths),))
    fresh = lengths
    for step in range(args.tokens):
        mask = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(fresh, args.context, lengths, device="cuda")
        x = embed(ids)
        for block, (keys, values) in zip(blocks, caches):
            x = block(x, mask, keys, values)
        last = torch.tensor(fresh).cumsum(0) - 1
        ids = head(x[last]).argmax(-1)
        fresh, lengths = [1] * args.requests, [n + 1 for n in lengths]
    print(ids.shape, torch.cuda.max_memory_allocated() // 2**20)
