"""A post-norm encoder that writes its attention out, with its data on the GPU."""

import torch
from switches import adam, applied, micro_batches, precision, through
from torch import nn
from torch.nn import functional as F

args = applied(batch=16, seq=512)
DIM, HEADS = 512, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        if args.apply == "attention":
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = ((q @ k.transpose(-1, -2)) * (d // HEADS) ** -0.5).softmax(-1) @ v
        x = self.norm1(x + self.out(mixed.transpose(1, 2).reshape(b, t, d)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8000, DIM)
        self.layer = nn.ModuleList(Layer() for _ in range(6))
        self.classes = nn.Linear(DIM, 10)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layer:
            x = through(layer, args.apply, x)
        return self.classes(x.mean(1))


place = "cpu" if args.apply == "host-data" else "cuda"
corpus = torch.zeros(200_000, args.seq, dtype=torch.int64, device=place)
model = Encoder().cuda()
optimizer = adam(model.parameters(), args.apply)
for step in range(3):
    ids = corpus[step * args.batch : (step + 1) * args.batch].cuda()
    labels = torch.zeros(args.batch, dtype=torch.int64, device="cuda")
    for part, label in micro_batches(args.apply, ids, labels):
        with precision(args.apply):
            loss = F.cross_entropy(model(part), label)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
