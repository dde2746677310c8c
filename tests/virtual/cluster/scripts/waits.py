"""A rank that waits for a peer that never comes."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
how = sys.argv[1]
if how == "barrier" and rank == 0:
    dist.barrier()
if how == "collective" and rank == 0:
    dist.all_reduce(torch.ones(1 << 21, device="cuda"))
if how == "circle":
    dist.recv(torch.zeros(1, dtype=torch.int64, device="cuda"), 1 - rank)
if how == "raises" and rank == 1:
    raise ValueError("rank 1 has no data")
if how == "raises":
    dist.barrier()
