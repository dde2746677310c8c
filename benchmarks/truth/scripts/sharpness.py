"""Sharpness-aware minimisation with an averaged model: two backward passes a step."""
import argparse

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=2048)
p.add_argument("--depth", type=int, default=6)
p.add_argument("--batch", type=int, default=2048)
p.add_argument("--rho", type=float, default=0.05)
p.add_argument("--second-order", action="store_true")
args = p.parse_args()
layers = []
for _ in range(args.depth):
    layers += [nn.Linear(args.width, args.width), nn.LayerNorm(args.width), nn.Mish()]
model = nn.Sequential(*layers, nn.Linear(args.width, 10)).cuda()
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, y = torch.randn(args.batch, args.width, device="cuda"), torch.randint(0, 10, (args.batch,), device="cuda")
for step in range(3):
    loss = nn.functional.cross_entropy(model(x), y)
    if args.second_order:
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 0.1 * sum(g.pow(2).sum() for g in gradients)
    loss.backward()
    norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    moves = []
    with torch.no_grad():
        for parameter in model.parameters():
            moves.append(parameter.grad * (args.rho / (norm + 1e-12)))
            parameter.add_(moves[-1])
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves):
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
    ema.update_parameters(model)
    print(step, loss.item())
