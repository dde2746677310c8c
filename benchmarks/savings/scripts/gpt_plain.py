"""A GPT in plain PyTorch, FP32, AdamW."""

import torch
from switches import adam, applied, micro_batches, precision, through, token_loss
from torch import nn
from torch.nn import functional as F

args = applied(batch=16, seq=512, layers=8, dim=768)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 12, d // 12).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50304, args.dim), nn.Embedding(args.seq, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.dim), nn.Linear(args.dim, 50304, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = through(block, args.apply, x)
        return self.norm(x)


model = Gpt().cuda()
optimizer = adam(model.parameters(), args.apply)
for _ in range(3):
    ids = torch.randint(0, 50304, (args.batch, args.seq)).cuda()
    for (part,) in micro_batches(args.apply, ids):
        with precision(args.apply):
            loss = token_loss(model.head, model(part), part, args.apply)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
