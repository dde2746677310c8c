"""A ResNet with SGD, whose gradients are cleared after the forward."""

import timm
import torch
from switches import applied, micro_batches, precision

args = applied(batch=64)
model = timm.create_model("resnet50", pretrained=False).cuda()
if args.apply == "checkpoint":
    model.set_grad_checkpointing()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    images, labels = torch.randn(args.batch, 3, 224, 224).cuda(), torch.randint(0, 1000, (args.batch,)).cuda()
    for number, (image, label) in enumerate(micro_batches(args.apply, images, labels)):
        with precision(args.apply):
            loss = torch.nn.functional.cross_entropy(model(image), label)
        if not number and args.apply != "free-gradients":
            optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    if args.apply == "free-gradients":
        optimizer.zero_grad()
