"""A state-space language model with its selective scan written by hand."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

p = argparse.ArgumentParser()
p.add_argument("--scan", default="chunks", choices=["steps", "chunks", "doubling"])
p.add_argument("--compile", action="store_true")
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--dim", type=int, default=768)
p.add_argument("--state", type=int, default=16)
p.add_argument("--layers", type=int, default=4)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()


def scan(decay, drive):
    """h[t] = decay[t] * h[t-1] + drive[t], over dimension 1."""
    if args.scan == "doubling":
        step = 1
        while step < decay.shape[1]:
            shifted = F.pad(drive[:, :-step], (0, 0, 0, 0, step, 0))
            drive = drive + decay * shifted
            decay = decay * F.pad(decay[:, :-step], (0, 0, 0, 0, step, 0), value=1.0)
            step *= 2
        return drive
    if args.scan == "chunks":
        out, last = [], torch.zeros_like(drive[:, 0])
        for a, b in zip(decay.split(64, 1), drive.split(64, 1)):
            total = a.clamp_min(1e-6).log().cumsum(1)
            grown = total.exp() * (last[:, None] + (b * (-total).exp()).cumsum(1))
            out.append(grown)
            last = grown[:, -1]
        return torch.cat(out, 1)
    out, h = [], torch.zeros_like(drive[:, 0])
    for t in range(decay.shape[1]):
        h = decay[:, t] * h + drive[:, t]
        out.append(h)
    return torch.stack(out, 1)


class Mamba(nn.Module):
    def __init__(self, dim, state):
        super().__init__()
        inner = 2 * dim
        self.norm, self.inside, self.out = nn.RMSNorm(dim), nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.select, self.delta = nn.Linear(inner, 2 * state + 48, bias=False), nn.Linear(48, inner)
        self.log_a = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x):
        u, gate = self.inside(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        low, b, c = self.select(u).split([48, args.state, args.state], -1)
        dt = F.softplus(self.delta(low)).float()
        decay = torch.exp(-dt[..., None] * self.log_a.exp())
        h = scan(decay, (dt * u.float())[..., None] * b[:, :, None].float())
        y = (h * c[:, :, None].float()).sum(-1) + self.skip * u
        return x + self.out((y * F.silu(gate)).to(x.dtype))


torch.manual_seed(0)
embed, head = nn.Embedding(32000, args.dim).cuda(), nn.Linear(args.dim, 32000, bias=False).cuda()
blocks = nn.ModuleList(Mamba(args.dim, args.state) for _ in range(args.layers)).cuda()
if args.compile:
    for block in blocks:
        block.compile()
optimizer = torch.optim.AdamW([*embed.parameters(), *head.parameters(), *blocks.parameters()], lr=1e-4)
for step in range(3):
    ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        x = embed(ids)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if args.checkpoint else block(x)
        loss = F.cross_entropy(head(x)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
