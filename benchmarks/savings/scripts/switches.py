"""What every script here shares: the one change to apply, and changes that take more than a word."""

import argparse

import torch
from torch.utils.checkpoint import checkpoint


def applied(**defaults):
    """The change that was asked for ("" is none), and a script's own numbers as flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def adam(parameters, change, lr=1e-4):
    """AdamW as the change has it."""
    if change == "eight-bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, lr=lr)
    return torch.optim.AdamW(parameters, lr=lr, fused=True if change == "fused" else None)


def through(layer, change, *inputs):
    """A layer's output; recomputed in backward where that is the change."""
    return checkpoint(layer, *inputs, use_reentrant=False) if change == "checkpoint" else layer(*inputs)


def token_loss(head, hidden, targets, change, chunks=8):
    """The cross entropy of tokens: at once, or chunk by chunk with each chunk's logits recomputed in backward."""
    loss = torch.nn.functional.cross_entropy
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if change != "chunked":
        return loss(head(hidden), targets)
    pairs = list(zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True))
    parts = [checkpoint(lambda h, t: loss(head(h), t, reduction="sum"), *pair, use_reentrant=False) for pair in pairs]
    return sum(parts) / targets.numel()


def micro_batches(change, *tensors):
    """The batch whole, or in two halves over which gradients are accumulated."""
    if change != "batch":
        return [tensors]
    return list(zip(*(tensor.chunk(2) for tensor in tensors), strict=True))


def precision(change):
    """Autocast to bfloat16, if that is the change."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=change == "autocast")
