"""Attention written out in einsums, without a mask: what is allocated after a forward, when others have run before it."""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--length", type=int, required=True)
parser.add_argument("--width", type=int, required=True)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--out", required=True)
options = parser.parse_args()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    shifted = scores - torch.max(scores, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    weights = powers / torch.sum(powers, dim=-1, keepdim=True)
    return torch.einsum("...qk,...kd->...qd", weights, v)


shape = options.batch, options.length, options.width
q, k, v = (torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3))
gradient = torch.randn_like(q)
out = attend(q, k, v)
out.backward(gradient)
q.grad = k.grad = v.grad = None
output = attend(q, k, v)
Path(options.out).write_text(json.dumps({"allocated": torch.cuda.memory_allocated()}))
