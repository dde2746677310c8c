"""The last rank needs more than a card has."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
last = dist.get_rank() == dist.get_world_size() - 1
held = [torch.empty(2**30, device="cuda") for _ in range(40 if last else 2)]
dist.barrier()
