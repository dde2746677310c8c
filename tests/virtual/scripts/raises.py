"""Fails for a reason of its own, after some work on the GPU."""

import torch

weights = torch.zeros(1024, 1024, device="cuda")
raise ValueError("the data set is empty")
