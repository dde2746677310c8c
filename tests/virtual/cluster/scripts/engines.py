"""What torch.distributed offers beside FSDP2: groups of every making, FSDP1, DDP of every kind, ZeRO, offload, checkpoints."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=device)
torch.cuda.set_device(device)
rank, world = dist.get_rank(), dist.get_world_size()


def layers():
    return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to(device)


def step(model, optimizer):
    model(torch.randn(4, 512, device=device)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


values = torch.ones(1024, device=device)
dist.all_reduce(values, group=dist.split_group(split_ranks=[[0, 1], [2, 3]]))
pairs, _ = dist.new_subgroups(2)
dist.all_reduce(values, group=pairs, async_op=True).wait()
every = [torch.empty(1024, device=device) for _ in range(world)]
dist.all_gather(every, values)
with dist._coalescing_manager(device=device):
    dist.all_reduce(values)
    dist.all_reduce(every[0])
ring = [dist.P2POp(dist.isend, values, (rank + 1) % world), dist.P2POp(dist.irecv, every[0], (rank - 1) % world)]
for work in dist.batch_isend_irecv(ring):
    work.wait()

flat = FullyShardedDataParallel(layers(), device_id=device.index)
for _ in range(2):
    step(flat, torch.optim.AdamW(flat.parameters()))

copied = DistributedDataParallel(layers(), device_ids=[device.index], gradient_as_bucket_view=True)
partitioned = ZeroRedundancyOptimizer(copied.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
for _ in range(2):
    with copied.no_sync():
        copied(torch.randn(4, 512, device=device)).sum().backward()
    step(copied, partitioned)

still = DistributedDataParallel(layers(), device_ids=[device.index], static_graph=True)
for _ in range(3):
    step(still, torch.optim.AdamW(still.parameters()))

uneven = DistributedDataParallel(layers(), device_ids=[device.index])
with uneven.join():
    for _ in range(1 + rank):
        uneven(torch.randn(4, 512, device=device)).sum().backward()

images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
images = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(images).to(device), device_ids=[device.index])
images(torch.randn(2, 3, 8, 8, device=device)).sum().backward()

sharded = layers()
for layer in sharded:
    layer.compile()
    fully_shard(layer)
optimizer = torch.optim.AdamW(fully_shard(sharded).parameters())
for last in (False, True):
    sharded.set_requires_gradient_sync(last)
    sharded(torch.randn(4, 512, device=device)).sum().backward()
optimizer.step()
states = dict(zip(("model", "optimizer"), get_state_dict(sharded, optimizer), strict=True))
dcp.save(states, checkpoint_id=sys.argv[1])
dcp.load(states, checkpoint_id=sys.argv[1])

offloaded = fully_shard(layers(), offload_policy=CPUOffloadPolicy())
step(offloaded, torch.optim.AdamW(offloaded.parameters()))
whole = get_model_state_dict(offloaded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    print("tensors", len(whole))
dist.destroy_process_group()
