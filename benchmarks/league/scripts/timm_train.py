"""Trains a timm model as timm's train.py does by default: SGD with Nesterov momentum, float32, images fetched on a side stream.

    python timm_train.py MODEL BATCH READING

What the allocator holds after the last step goes into the file READING: the search for cuDNN's engines, which is over in moments,
is not in it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2

STEPS = 2  # the first has the search and ends with the momentum


def batches(size: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches that a second stream copies and normalises while the step before is at work."""
    stream = torch.cuda.Stream()
    mean, std = (torch.full((1, 3, 1, 1), value).cuda() for value in (127.5, 64.0))
    ahead = None
    for _ in range(STEPS + 1):
        with torch.cuda.stream(stream):
            images, labels = torch.zeros(size, dtype=torch.uint8), torch.zeros(size[0], dtype=torch.long)
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            images = images.to(torch.float32).sub_(mean).div_(std)
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream().wait_stream(stream)
        ahead = images, labels


def main() -> None:
    name, batch, reading = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.backends.cudnn.benchmark = True
    model = timm.create_model(name).cuda()
    shape = timm.data.resolve_data_config({}, model=model)["input_size"]
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=2e-5, momentum=0.9)
    loss_fn = LabelSmoothingCrossEntropy(0.1)
    model.train()
    optimizer.zero_grad()
    for images, labels in batches((batch, *shape)):
        output = model(images)
        output = output[0] if isinstance(output, tuple | list) else output  # the second is of a teacher's head
        loss = loss_fn(output, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    reading.write_text(str(torch.cuda.memory_reserved()))


if __name__ == "__main__":
    main()
