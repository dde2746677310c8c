"""Trains a random perceptron on random data with Adam: what GPUMemNet's generator runs for a minute.

    python random_mlp.py --inputs 61 --outputs 12 --depth 5 --shape pyramid --batch 777 [--activation relu --dropout --norm]

An epoch has 4,096 samples. Steps of one size repeat themselves, so three of each epoch's full batches stand for all of them.
"""

import argparse
import itertools

import torch
from torch import nn

SAMPLES = 4096
ACTIVATIONS = {
    "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "prelu": nn.PReLU, "elu": nn.ELU, "selu": nn.SELU, "tanh": nn.Tanh,
    "softplus": nn.Softplus, "swish": nn.SiLU, "mish": nn.Mish, "gelu": nn.GELU, "identity": nn.Identity,
}  # fmt: skip


def widths(shape: str, inputs: int, outputs: int, depth: int) -> list[int]:
    """The hidden layers' sizes, after the inputs."""
    found = [inputs]
    for _ in range(depth + (shape == "bottleneck")):
        smaller = {"uniform": found[-1], "gradual": found[-1] - (inputs - outputs) // depth}
        found.append(smaller[shape] if shape == "uniform" else max(smaller.get(shape, found[-1] // 2), outputs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--inputs", "--outputs", "--depth", "--batch"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--shape", choices=("pyramid", "uniform", "bottleneck", "gradual"), required=True)
    parser.add_argument("--activation", choices=ACTIVATIONS)
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--norm", action="store_true")
    options = parser.parse_args()

    sizes = widths(options.shape, options.inputs, options.outputs, options.depth)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after)] + [nn.BatchNorm1d(after)] * options.norm
        layers += [ACTIVATIONS[options.activation or "relu"]()] + [nn.Dropout(0.3)] * options.dropout
    layers.append(nn.Linear(sizes[-1], options.outputs))
    if options.activation:  # the second set of figures ends in probabilities
        layers.append(nn.Softmax(dim=1) if options.outputs > 1 else nn.Identity())
    model = nn.Sequential(*layers).cuda()
    model(torch.rand(2, options.inputs).cuda())  # the summary that is printed first

    criterion = nn.CrossEntropyLoss() if options.outputs > 1 else nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters())
    full, last = divmod(SAMPLES, options.batch)
    for batch in ([options.batch] * min(full, 3) + [last] * bool(last)) * 2:
        inputs, labels = torch.zeros(batch, options.inputs).cuda(), torch.zeros(batch, dtype=torch.long).cuda()
        optimizer.zero_grad()
        outputs = model(inputs)
        if options.outputs == 1 and options.activation:
            labels = labels.view(-1, 1).float()
        loss = criterion(outputs, labels)  # the first set's labels do not fit one output: those runs end here
        loss.backward()
        optimizer.step()
        loss.item()


if __name__ == "__main__":
    main()
