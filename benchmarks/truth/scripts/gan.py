"""A DCGAN, or a Wasserstein GAN with gradient penalty (double backward)."""

import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=128)
p.add_argument("--width", type=int, default=64)
p.add_argument("--penalty", action="store_true")
args = p.parse_args()
w = args.width


def up(cin, cout):
    return [nn.ConvTranspose2d(cin, cout, 4, 2, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(True)]


def down(cin, cout):
    norm = [] if args.penalty else [nn.BatchNorm2d(cout)]
    return [nn.Conv2d(cin, cout, 4, 2, 1, bias=False), *norm, nn.LeakyReLU(0.2, inplace=True)]


generator = nn.Sequential(
    nn.ConvTranspose2d(100, 8 * w, 4, 1, 0, bias=False), nn.BatchNorm2d(8 * w), nn.ReLU(True),
    *up(8 * w, 4 * w), *up(4 * w, 2 * w), *up(2 * w, w), nn.ConvTranspose2d(w, 3, 4, 2, 1), nn.Tanh(),
).cuda()
critic = nn.Sequential(
    *down(3, w), *down(w, 2 * w), *down(2 * w, 4 * w), *down(4 * w, 8 * w), nn.Conv2d(8 * w, 1, 4), nn.Flatten(0)
).cuda()
optimizers = [torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (generator, critic)]
for step in range(3):
    real = torch.randn(args.batch, 3, 64, 64, device="cuda")
    fake = generator(torch.randn(args.batch, 100, 1, 1, device="cuda"))
    optimizers[1].zero_grad()
    if args.penalty:
        mix = torch.rand(args.batch, 1, 1, 1, device="cuda")
        between = (mix * real + (1 - mix) * fake.detach()).requires_grad_(True)
        gradient, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * (gradient.flatten(1).norm(dim=1) - 1).square().mean()
    else:
        ones = torch.ones(args.batch, device="cuda")
        bce = nn.functional.binary_cross_entropy_with_logits
        loss = bce(critic(real), ones) + bce(critic(fake.detach()), 0 * ones)
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    (-critic(fake).mean()).backward()
    optimizers[0].step()
    print(step, loss.item())
