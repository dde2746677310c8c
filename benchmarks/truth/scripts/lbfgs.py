"""Solve a differential equation with a network trained by L-BFGS."""
import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--points", type=int, default=100_000)
p.add_argument("--width", type=int, default=512)
p.add_argument("--depth", type=int, default=5)
p.add_argument("--history", type=int, default=20)
p.add_argument("--inner", type=int, default=10)
p.add_argument("--search", action="store_true", help="strong Wolfe line search")
args = p.parse_args()

torch.manual_seed(0)
layers = [nn.Linear(2, args.width), nn.Tanh()]
for _ in range(args.depth):
    layers += [nn.Linear(args.width, args.width), nn.Tanh()]
model = nn.Sequential(*layers, nn.Linear(args.width, 1)).cuda()
points = torch.rand(args.points, 2, device="cuda", requires_grad=True)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=args.inner, history_size=args.history,
                              line_search_fn="strong_wolfe" if args.search else None)


def closure():
    optimizer.zero_grad()
    u = model(points)
    first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]
    loss = (first[:, 1] - 0.1 * second).square().mean() + (u - torch.sin(points.detach().sum(1, keepdim=True))).square().mean()
    loss.backward()
    return loss


for step in range(3):
    print(step, float(optimizer.step(closure)), torch.cuda.max_memory_allocated() // 2**20)
