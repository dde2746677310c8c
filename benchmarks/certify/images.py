"""Trains a vision model on images of many sizes: `python benchmarks/certify/images.py --model resnet50`.

Every batch has one size, drawn by a seed, as multi-scale training has. With `--cap GIB` the process may hold no more than that.
"""

import argparse
import importlib
import random
from contextlib import suppress

import torch
from torch.utils.data import DataLoader, Dataset

with suppress(ImportError):
    importlib.import_module(
        "torchvision_names"
    )  # where torchvision is not installed, the names that timm imports from it
timm = importlib.import_module("timm")

parser = argparse.ArgumentParser()
add = parser.add_argument
add("--model", default="resnet50")
add("--samples", type=int, default=640)
add("--batch", type=int, default=16)
add("--epochs", type=int, default=1)
add("--least", type=int, default=160)
add("--most", type=int, default=448)
add("--step", type=int, default=32)
add("--square", action="store_true")
add("--optimizer", choices=("adamw", "sgd"), default="sgd")
add("--eval-every", type=int, default=0)
add("--eval-batch", type=int, default=32)
add("--channels-last", action="store_true")
add("--precision", choices=("fp32", "autocast"), default="autocast")
add("--seed", type=int, default=0)
add("--cap", type=float, default=0.0, metavar="GIB")
options = parser.parse_args()


class Images(Dataset):
    """Sizes belong to batches: those of a batch come one after the other."""

    def __init__(self, count, seed):
        draw = random.Random(seed)
        sides = range(options.least, options.most + 1, options.step)
        self.sizes = []
        for _ in range(-(-count // options.batch)):
            height = draw.choice(sides)
            self.sizes += [(height, height if options.square else draw.choice(sides))] * options.batch
        self.sizes = self.sizes[:count]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, at):
        return torch.zeros(3, *self.sizes[at]), at % 1000


def evaluate(model, loader):
    model.eval()
    right = 0
    with torch.inference_mode():
        for images, labels in loader:
            with torch.autocast("cuda", torch.bfloat16, enabled=options.precision == "autocast"):
                found = model(images.cuda())
            right += (found.argmax(-1) == labels.cuda()).sum().item()
    model.train()
    return right


def main():
    torch.manual_seed(options.seed)
    if options.cap:
        torch.cuda.set_per_process_memory_fraction(options.cap * 2**30 / torch.cuda.mem_get_info()[1])
    dynamic = {"dynamic_img_size": True} if options.model.startswith("vit") else {}
    model = timm.create_model(options.model, pretrained=False, **dynamic).cuda()
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model.train()
    make = torch.optim.SGD if options.optimizer == "sgd" else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-3, **({"momentum": 0.9} if options.optimizer == "sgd" else {}))
    loader = DataLoader(Images(options.samples, options.seed), options.batch)
    held_out = torch.utils.data.TensorDataset(torch.zeros(64, 3, 288, 288), torch.zeros(64, dtype=torch.long))
    validation = DataLoader(held_out, options.eval_batch)
    criterion = torch.nn.CrossEntropyLoss()
    step = 0
    for _epoch in range(options.epochs):
        for images, labels in loader:
            step += 1
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            if options.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16, enabled=options.precision == "autocast"):
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step}", flush=True)
            if options.eval_every and step % options.eval_every == 0:
                evaluate(model, validation)
                print(f"evaluated after step {step}", flush=True)
    print("done", flush=True)


main()
