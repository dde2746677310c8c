"""Early-exit inference and hard-example mining: how many rows go on depends on computed confidences."""

import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8192)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--stages", type=int, default=8)
parser.add_argument("--mine", action="store_true", help="train on the half with the highest loss")
parser.add_argument("--quantile", type=float, default=0.3)
opts = parser.parse_args()
torch.manual_seed(77)
torch.set_default_device("cuda")


class Stage(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(w), nn.Linear(w, 2 * w), nn.GELU(), nn.Linear(2 * w, w))
        self.head = nn.Linear(w, 1000)

    def forward(self, x):
        x = x + self.f(x)
        return x, self.head(x)


stages = nn.ModuleList([Stage(opts.width) for _ in range(opts.stages)])
if opts.mine:
    opt = torch.optim.Adamax(stages.parameters(), lr=1e-4)
    for it in range(3):
        x, y = torch.randn(opts.batch, opts.width), torch.randint(0, 1000, (opts.batch,))
        with torch.no_grad():
            h = x
            for s in stages:
                h, logits = s(h)
            losses = nn.functional.cross_entropy(logits, y, reduction="none")
        hard = losses > losses.median()
        x, y = x[hard], y[hard]
        total = 0.0
        for s in stages:
            x, logits = s(x)
            total = total + nn.functional.cross_entropy(logits, y)
        opt.zero_grad()
        total.backward()
        opt.step()
        print(it, int(hard.sum()), total.item())
else:
    with torch.inference_mode():
        for it in range(3):
            x = torch.randn(opts.batch, opts.width)
            alive = torch.arange(opts.batch)
            answer = torch.zeros(opts.batch, dtype=torch.long)
            for n, s in enumerate(stages):
                x, logits = s(x)
                conf, cls = logits.softmax(-1).max(-1)
                done = conf >= conf.quantile(1 - opts.quantile)
                answer[alive[done]] = cls[done]
                keep = (~done).nonzero().squeeze(1)
                alive, x = alive[keep], x[keep]
                print(n, alive.numel(), end="; ")
                if alive.numel() < 64:
                    break
            print(answer.unique().numel())
