"""Per-sample gradients with torch.func, a Hessian-vector product, and checkpointed sequential blocks."""
import argparse

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint_sequential

p = argparse.ArgumentParser()
p.add_argument("--kind", choices=["private", "hessian", "segments"], default="private")
p.add_argument("--batch", type=int, default=64)
p.add_argument("--width", type=int, default=1024)
args = p.parse_args()
model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(args.width, args.width), nn.Tanh())]).cuda()
x, y = torch.randn(args.batch, args.width, device="cuda"), torch.randn(args.batch, args.width, device="cuda")
optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)


def loss_of(parameters, sample, target):
    return (functional_call(model, parameters, (sample[None],)) - target[None]).square().mean()


for step in range(2):
    if args.kind == "private":
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        gradients = vmap(grad(loss_of), (None, 0, 0))(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        scale = (1 / norms).clamp(max=1)
        for name, value in model.named_parameters():
            value.grad = torch.einsum("b,b...->...", scale, gradients[name]) + 0.1 * torch.randn_like(value)
    elif args.kind == "hessian":
        loss = (model(x) - y).square().mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        vector = [torch.randn_like(g) for g in first]
        second = torch.autograd.grad(first, list(model.parameters()), vector)
        for value, g in zip(model.parameters(), second):
            value.grad = g
    else:
        (checkpoint_sequential(model, 4, x, use_reentrant=False) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
