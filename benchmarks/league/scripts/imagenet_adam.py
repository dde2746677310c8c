"""Trains an image classifier with Adam in float32 and evaluates it, a few batches each.

    python imagenet_adam.py MODEL BATCH READING

What the allocator holds at the end goes into the file READING.
"""

import sys
from pathlib import Path

import torch
from torch import nn

STEPS = 3
NAMES = {
    "vgg16": "vgg16", "resnet50": "resnet50", "mobilenetV2": "mobilenet_v2", "efficientnet": "efficientnet_b0",
    "inception": "inception_v3",
}  # fmt: skip


def build(name: str) -> nn.Module:
    """The model with 1,000 classes: timm's Xception, the others are torchvision's."""
    if name == "Xception":
        import timm

        return timm.create_model("xception", num_classes=1000)
    from torchvision import models

    return getattr(models, NAMES[name])(weights=None, **({"aux_logits": False} if name == "inception" else {}))


def main() -> None:
    name, batch, reading = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    side = 299 if name == "inception" else 224
    model = build(name).cuda()
    model(torch.rand(2, 3, side, side).cuda())  # the summary that is printed first
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for step in range(2 * STEPS):
        training = step < STEPS
        model.train(training)
        with torch.set_grad_enabled(training):
            inputs = torch.zeros(batch, 3, side, side).cuda()
            labels = torch.zeros(batch, dtype=torch.long).cuda()
            if training:
                optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            if training:
                loss.backward()
                optimizer.step()
            loss.item()
    reading.write_text(str(torch.cuda.memory_reserved()))


if __name__ == "__main__":
    main()
