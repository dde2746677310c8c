"""One kind of step of timm's own benchmark: `python benchmarks/steps/timm_step.py MODEL --batch 256 [--train] [--channels-last]`.

As `benchmark.py` of pytorch-image-models runs it: FP16 autocast without a scaler, SGD with momentum, random inputs.
"""

import argparse

import timm
import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    arguments = parser.parse_args()
    layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
    model = timm.create_model(arguments.model).to("cuda", memory_format=layout).train(arguments.train)
    images = torch.randn(arguments.batch, 3, 224, 224, device="cuda").contiguous(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True) if arguments.train else None
    for _ in range(3):
        if optimizer is None:
            with torch.no_grad(), torch.autocast("cuda", torch.float16):
                model(images)
            continue
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            output = model(images)
            target = torch.empty(len(output), device="cuda", dtype=torch.long).random_(1000)
            loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
