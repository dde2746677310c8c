"""A GAN: two models, two optimizers."""

import torch
from switches import adam, applied
from torch import nn

args = applied(batch=64, width=64)
size = args.batch // 2 if args.apply == "batch" else args.batch
w = args.width


def up(before, after):
    return [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def down(before, after):
    return [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]


maker = nn.Sequential(
    nn.ConvTranspose2d(100, 8 * w, 4, bias=False), *up(8 * w, 4 * w), *up(4 * w, 2 * w), *up(2 * w, w), *up(w, w),
    nn.Conv2d(w, 3, 3, padding=1), nn.Tanh(),
).cuda()  # fmt: skip
critic = nn.Sequential(
    *down(3, w), *down(w, 2 * w), *down(2 * w, 4 * w), *down(4 * w, 8 * w), nn.Flatten(), nn.LazyLinear(1)
).cuda()
critic(torch.randn(2, 3, 64, 64).cuda())
optimizers = [adam(net.parameters(), args.apply) for net in (maker, critic)]
loss = nn.functional.binary_cross_entropy_with_logits
with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.apply == "autocast"):
    for _ in range(3):
        fake = maker(torch.randn(size, 100, 1, 1).cuda())
        real = torch.randn(size, 3, 64, 64).cuda()
        ones = torch.ones(size, 1).cuda()
        optimizers[1].zero_grad()
        (loss(critic(real), ones) + loss(critic(fake.detach()), 0 * ones)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss(critic(fake), ones).backward()
        optimizers[0].step()
