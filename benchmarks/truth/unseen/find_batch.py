"""Find the largest batch that fits, then train with it."""

import argparse
import gc

import torch
import torch.nn as nn


class MixerBlock(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.tok = nn.Sequential(nn.Linear(n, n * 2), nn.GELU(), nn.Linear(n * 2, n))
        self.ch = nn.Sequential(nn.Linear(d, d * 4), nn.GELU(), nn.Linear(d * 4, d))

    def forward(self, x):
        x = x + self.tok(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.ln2(x))


def make_model(depth, d):
    return nn.Sequential(
        nn.Conv2d(3, d, 16, 16),
        nn.Flatten(2),
        Transpose(),
        *[MixerBlock(196, d) for _ in range(depth)],
        nn.LayerNorm(d),
        Mean(),
        nn.Linear(d, 1000),
    )


class Transpose(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def one_step(model, opt, bs):
    x = torch.randn(bs, 3, 224, 224, device="cuda")
    y = torch.randint(0, 1000, (bs,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    return loss


def search_by_halving(model, opt, start):
    bs = start
    while bs > 0:
        try:
            one_step(model, opt, bs)
            return bs
        except torch.cuda.OutOfMemoryError as e:
            print("bs", bs, "does not fit:", str(e)[:60])
        opt.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        bs //= 2
    raise RuntimeError("nothing fits")


def search_by_doubling(model, opt, start, limit):
    bs, good = start, 0
    while bs <= limit:
        try:
            one_step(model, opt, bs)
            good, bs = bs, bs * 2
        except RuntimeError as e:
            if "out of memory" not in str(e):
                raise
            break
        finally:
            torch.cuda.empty_cache()
    opt.zero_grad()
    torch.cuda.empty_cache()
    return good


def from_memory_info(model, opt):
    torch.cuda.reset_peak_memory_stats()
    one_step(model, opt, 8)
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    one_step(model, opt, 16)
    per_sample = (torch.cuda.max_memory_allocated() - base) / 16
    free, total = torch.cuda.mem_get_info()
    return max(1, int(0.25 * free / per_sample) // 8 * 8)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--way", choices=["halve", "double", "info"], default="halve")
    ap.add_argument("--start", type=int, default=4096)
    ap.add_argument("--limit", type=int, default=4096)
    ap.add_argument("--depth", type=int, default=12)
    ap.add_argument("--dim", type=int, default=768)
    ap.add_argument("--fraction", type=float, default=1.0)
    args = ap.parse_args()
    torch.manual_seed(0)
    if args.fraction < 1:
        torch.cuda.set_per_process_memory_fraction(args.fraction, 0)
    model = make_model(args.depth, args.dim).cuda()
    opt = torch.optim.Adam(model.parameters())
    if args.way == "halve":
        bs = search_by_halving(model, opt, args.start)
    elif args.way == "double":
        bs = search_by_doubling(model, opt, args.start, args.limit)
    else:
        bs = from_memory_info(model, opt)
    print("training with", bs)
    for _ in range(2):
        loss = one_step(model, opt, bs)
    print(loss.item(), torch.cuda.max_memory_allocated() // 2**20, "MiB")
