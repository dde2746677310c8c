"""Train a denoising U-Net under torch.compile, with an exponential moving average of its weights."""
import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn


class Res(nn.Module):
    def __init__(self, cin, cout, emb):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(32, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.emb = nn.Linear(emb, 2 * cout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, e):
        scale, shift = self.emb(e)[:, :, None, None].chunk(2, dim=1)
        h = self.n2(self.c1(F.silu(self.n1(x)))) * (1 + scale) + shift
        return self.c2(F.silu(h)) + self.skip(x)


class Attend(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n, self.qkv, self.out = nn.GroupNorm(32, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.n(x)).view(b, 3, c // 64, 64, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, base):
        super().__init__()
        emb = 4 * base
        self.time = nn.Sequential(nn.Linear(1, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.stem = nn.Conv2d(3, base, 3, padding=1)
        self.d1, self.d2, self.d3 = Res(base, base, emb), Res(base, 2 * base, emb), Res(2 * base, 4 * base, emb)
        self.m1, self.attend, self.m2 = Res(4 * base, 4 * base, emb), Attend(4 * base), Res(4 * base, 4 * base, emb)
        self.u3, self.u2, self.u1 = Res(8 * base, 2 * base, emb), Res(4 * base, base, emb), Res(2 * base, base, emb)
        self.out = nn.Sequential(nn.GroupNorm(32, base), nn.SiLU(), nn.Conv2d(base, 3, 3, padding=1))

    def forward(self, x, t):
        e = self.time(t[:, None])
        h1 = self.d1(self.stem(x), e)
        h2 = self.d2(F.avg_pool2d(h1, 2), e)
        h3 = self.d3(F.avg_pool2d(h2, 2), e)
        y = self.m2(self.attend(self.m1(h3, e)), e)
        y = F.interpolate(self.u3(torch.cat([y, h3], 1), e), scale_factor=2)
        y = F.interpolate(self.u2(torch.cat([y, h2], 1), e), scale_factor=2)
        return self.out(self.u1(torch.cat([y, h1], 1), e))


p = argparse.ArgumentParser()
p.add_argument("--base", type=int, default=128)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--image", type=int, default=64)
p.add_argument("--bf16", action="store_true")
p.add_argument("--channels-last", action="store_true")
p.add_argument("--mode", default="default")
p.add_argument("--sample", type=int, default=0, help="denoise for so many steps after training")
args = p.parse_args()

torch.manual_seed(0)
form = torch.channels_last if args.channels_last else torch.contiguous_format
model = UNet(args.base).to("cuda", memory_format=form)
average = copy.deepcopy(model).requires_grad_(False)
compiled = torch.compile(model, mode=args.mode)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
for step in range(4):
    x = torch.randn(args.batch, 3, args.image, args.image, device="cuda").to(memory_format=form)
    noise, t = torch.randn_like(x), torch.rand(args.batch, device="cuda")
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast("cuda", torch.bfloat16, enabled=args.bf16):
        loss = F.mse_loss(compiled(torch.lerp(x, noise, t[:, None, None, None]), t).float(), noise - x)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
    print(step, loss.item())
if args.sample:
    average.eval()
    denoise = torch.compile(average, mode=args.mode)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=args.bf16):
        x = torch.randn(args.batch, 3, args.image, args.image, device="cuda").to(memory_format=form)
        for i in range(args.sample):
            torch.compiler.cudagraph_mark_step_begin()
            x = x - denoise(x, torch.full((args.batch,), 1 - i / args.sample, device="cuda")).float() / args.sample
    print(x.std().item())
