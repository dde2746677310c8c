"""A vision transformer of timm in a plain loop."""

import timm
import torch
from switches import adam, applied, micro_batches, precision

args = applied(batch=64)
model = timm.create_model("vit_small_patch16_224", pretrained=False).cuda()
if args.apply == "checkpoint":
    model.set_grad_checkpointing()
optimizer = adam(model.parameters(), args.apply)
for _ in range(3):
    images, labels = torch.randn(args.batch, 3, 224, 224).cuda(), torch.randint(0, 1000, (args.batch,)).cuda()
    for image, label in micro_batches(args.apply, images, labels):
        with precision(args.apply):
            loss = torch.nn.functional.cross_entropy(model(image), label)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
