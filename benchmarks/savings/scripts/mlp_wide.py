"""A wide perceptron: its optimizer's step is the peak."""

import torch
from switches import adam, applied, micro_batches, precision, through
from torch import nn

args = applied(batch=256, width=8192)
model = nn.ModuleList(nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU()) for _ in range(6)).cuda()
optimizer = adam(model.parameters(), args.apply)
for _ in range(3):
    x = torch.randn(args.batch, args.width).cuda()
    for (part,) in micro_batches(args.apply, x):
        with precision(args.apply):
            for layer in model:
                part = through(layer, args.apply, part)
            loss = part.square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
