"""A step holds as much as the one before: its gradients' buckets are not kept by torch's watchdog of collectives."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
model = DistributedDataParallel(layers, gradient_as_bucket_view=True, bucket_cap_mb=40)
held = []
for _ in range(3):
    loss = model(torch.randn(8, 2048, device="cuda")).sum()
    loss.backward()
    model.zero_grad()
    loss.item()
    held.append(torch.cuda.memory_allocated())
dist.destroy_process_group()
assert held == held[:1] * 3, held
