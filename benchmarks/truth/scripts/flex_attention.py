"""Train a transformer whose attention is compiled flex attention."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

p = argparse.ArgumentParser()
p.add_argument("--mask", default="causal", choices=["causal", "window", "document", "prefix", "none"])
p.add_argument("--score", default="none", choices=["none", "alibi", "softcap", "bias"])
p.add_argument("--window", type=int, default=512)
p.add_argument("--whole", action="store_true", help="compile the whole model and not attention alone")
p.add_argument("--groups", type=int, default=1, help="query heads that share a key head")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=4096)
p.add_argument("--dim", type=int, default=1024)
p.add_argument("--heads", type=int, default=16)
p.add_argument("--layers", type=int, default=4)
p.add_argument("--infer", action="store_true")
args = p.parse_args()

attend = flex_attention if args.whole else torch.compile(flex_attention, dynamic=False)
slopes = torch.exp2(-torch.arange(1, args.heads + 1, device="cuda") * 8.0 / args.heads)
bias = nn.Parameter(torch.zeros(args.heads, 2 * args.seq, device="cuda"))
# Documents of different lengths packed into one row.
cuts = torch.randint(1, args.seq, (args.batch, 7), generator=torch.Generator().manual_seed(0)).sort(1).values
documents = torch.searchsorted(cuts, torch.arange(args.seq).expand(args.batch, -1).contiguous(), right=True).to("cuda", torch.int32)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < args.window)


def document(b, h, q, k):
    return (q >= k) & (documents[b, q] == documents[b, k])


def prefix(b, h, q, k):
    return (q >= k) | (k < 256)


def alibi(score, b, h, q, k):
    return score + slopes[h] * (k - q)


def softcap(score, b, h, q, k):
    return 20 * torch.tanh(score / 20)


def learned(score, b, h, q, k):
    return score + bias[h, q - k + args.seq]


score = {"none": None, "alibi": alibi, "softcap": softcap, "bias": learned}[args.score]
rule = {"causal": causal, "window": window, "document": document, "prefix": prefix}.get(args.mask)


class Block(nn.Module):
    def __init__(self, dim, heads, groups):
        super().__init__()
        self.heads, self.kv = heads, heads // groups
        self.size = dim // heads
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, n * self.size, bias=False) for n in (heads, self.kv, self.kv))
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.gate, self.down = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x, mask):
        b, t, c = x.shape
        y = self.n1(x)
        q = self.q(y).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = (f(y).view(b, t, self.kv, self.size).transpose(1, 2) for f in (self.k, self.v))
        y = attend(q, k, v, score_mod=score, block_mask=mask, enable_gqa=self.kv != self.heads)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32000, args.dim), nn.Linear(args.dim, 32000, bias=False)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, args.groups) for _ in range(args.layers))

    def forward(self, ids, mask):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


torch.manual_seed(0)
model = Model().to("cuda", torch.bfloat16)
run = torch.compile(model) if args.whole else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(3):
    ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
    mask = None
    if rule:
        rows = args.batch if args.mask == "document" else None
        mask = create_block_mask(rule, rows, None, args.seq, args.seq, device="cuda", _compile=args.mask == "document")
    if args.infer:
        with torch.no_grad():
            print(step, run(ids, mask).argmax(-1)[0, 0].item())
        continue
    logits = run(ids, mask)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
