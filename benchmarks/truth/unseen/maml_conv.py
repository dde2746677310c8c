"""MAML with torch.func: vmap over tasks, second order."""

import argparse
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

ap = argparse.ArgumentParser()
ap.add_argument("--n_way", type=int, default=5)
ap.add_argument("--k_spt", type=int, default=5)
ap.add_argument("--k_qry", type=int, default=15)
ap.add_argument("--task_num", type=int, default=16)
ap.add_argument("--inner", type=int, default=5)
ap.add_argument("--hidden", type=int, default=64)
ap.add_argument("--img", type=int, default=84)
ap.add_argument("--first-order", action="store_true")
ap.add_argument("--loop", action="store_true", help="a python loop over tasks instead of vmap")
args = ap.parse_args()
torch.manual_seed(222)
device = torch.device("cuda")


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU(), nn.MaxPool2d(2))


h = args.hidden
net = nn.Sequential(
    block(3, h), block(h, h), block(h, h), block(h, h), nn.Flatten(), nn.Linear(h * (args.img // 16) ** 2, args.n_way)
).to(device)
meta_params = {k: v for k, v in net.named_parameters()}
opt = torch.optim.Adam(net.parameters(), lr=1e-3)


def compute_loss(params, x, y):
    return F.cross_entropy(functional_call(net, params, (x,)), y)


def loss_for_task(x_spt, y_spt, x_qry, y_qry):
    params = meta_params
    for _ in range(args.inner):
        g = grad(compute_loss)(params, x_spt, y_spt)
        if args.first_order:
            g = {k: v.detach() for k, v in g.items()}
        params = {k: params[k] - 0.4 * g[k] for k in params}
    logits = functional_call(net, params, (x_qry,))
    return F.cross_entropy(logits, y_qry), (logits.argmax(1) == y_qry).float().mean()


for step in range(3):
    shape = (args.task_num, args.n_way * args.k_spt, 3, args.img, args.img)
    x_spt = torch.randn(shape, device=device)
    y_spt = torch.arange(args.n_way, device=device).repeat(args.k_spt).expand(args.task_num, -1)
    x_qry = torch.randn(args.task_num, args.n_way * args.k_qry, 3, args.img, args.img, device=device)
    y_qry = torch.arange(args.n_way, device=device).repeat(args.k_qry).expand(args.task_num, -1)
    opt.zero_grad()
    if args.loop:
        res = [loss_for_task(a, b, c, d) for a, b, c, d in zip(x_spt, y_spt, x_qry, y_qry)]
        qry_losses, qry_accs = map(torch.stack, zip(*res))
    else:
        qry_losses, qry_accs = vmap(loss_for_task)(x_spt, y_spt, x_qry, y_qry)
    qry_losses.sum().backward()
    opt.step()
    print(step, qry_losses.mean().item(), qry_accs.mean().item())
