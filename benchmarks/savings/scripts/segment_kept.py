"""A small convolutional network on large images, whose gradients are set to zero and kept."""

import torch
from switches import adam, applied, micro_batches, precision
from torch import nn

args = applied(batch=4, image=64)
model = nn.Sequential(
    nn.Conv2d(3, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 1024, 3, padding=1), nn.ReLU(),
    nn.Conv2d(1024, 1024, 3, padding=1), nn.ReLU(), nn.Conv2d(1024, 21, 1),
).cuda()  # fmt: skip
optimizer = adam(model.parameters(), args.apply)
for _ in range(3):
    images = torch.randn(args.batch, 3, args.image, args.image).cuda()
    masks = torch.zeros(args.batch, args.image, args.image, dtype=torch.int64).cuda()
    for image, mask in micro_batches(args.apply, images, masks):
        with precision(args.apply):
            loss = nn.functional.cross_entropy(model(image), mask)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=args.apply == "free-gradients")
