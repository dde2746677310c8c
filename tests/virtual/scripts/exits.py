"""Leaves with a status of its own."""

import sys

import torch

print(torch.ones(8, device="cuda").sum().item())
sys.exit(7)
