"""Ranks that disagree."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
tensor = torch.ones(8 + rank if sys.argv[1] == "shape" else 8, device="cuda")
if sys.argv[1] == "operation" and rank == 1:
    dist.broadcast(tensor, 0)
else:
    dist.all_reduce(tensor)
