"""A 3-D convolutional classifier and a temporal convolution, with SGD and a learning-rate warm-up."""
import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=8)
p.add_argument("--frames", type=int, default=16)
p.add_argument("--size", type=int, default=96)
p.add_argument("--width", type=int, default=32)
p.add_argument("--amp", action="store_true")
args = p.parse_args()
w = args.width


def block(a, b, stride):
    return nn.Sequential(nn.Conv3d(a, b, 3, stride, 1, bias=False), nn.BatchNorm3d(b), nn.ReLU(inplace=True))


model = nn.Sequential(block(3, w, (1, 2, 2)), block(w, 2 * w, 2), block(2 * w, 4 * w, 2), nn.AdaptiveAvgPool3d((4, 1, 1)),
                      nn.Flatten(2), nn.Conv1d(4 * w, 8 * w, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Dropout(0.3),
                      nn.Linear(16 * w, 400)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
for step in range(3):
    clip = torch.randn(args.batch, 3, args.frames, args.size, args.size, device="cuda")
    label = torch.randint(0, 400, (args.batch,), device="cuda")
    with torch.autocast("cuda", enabled=args.amp):
        loss = nn.functional.cross_entropy(model(clip), label)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(loss.item())
