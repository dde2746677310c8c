"""Every collective on host tensors over gloo; rank 0 prints what it got."""

import json
import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine = torch.arange(4, dtype=torch.float32) + 10 * rank
got = {}


def zeros(count=4):
    return torch.zeros(count)


for name in ("SUM", "PRODUCT", "MIN", "MAX"):
    values = mine.clone()
    dist.all_reduce(values, op=getattr(dist.ReduceOp, name))
    got[f"all_reduce {name}"] = values
values = mine.clone()
dist.broadcast(values, 1)
got["broadcast"] = values
values = mine.clone()
dist.reduce(values, 0)
got["reduce"] = values
parts = [zeros() for _ in range(world)]
dist.all_gather(parts, mine)
got["all_gather"] = torch.stack(parts)
flat = zeros(4 * world)
dist.all_gather_single(flat, mine) if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor(flat, mine)
got["all_gather_into_tensor"] = flat
parts = [zeros() for _ in range(world)] if rank == 0 else None
dist.gather(mine, parts, dst=0)
got["gather"] = torch.stack(parts) if parts else zeros()
values = zeros()
dist.scatter(values, [mine + i for i in range(world)] if rank == 1 else None, src=1)
got["scatter"] = values
values = zeros()
dist.reduce_scatter(values, [mine + i for i in range(world)])
got["reduce_scatter"] = values
values = zeros(2 * world)
dist.all_to_all_single(values, torch.arange(2 * world, dtype=torch.float32) + 100 * rank)
got["all_to_all_single"] = values
waiting = [dist.isend(mine, (rank + 1) % world)]
values = zeros()
waiting.append(dist.irecv(values, (rank - 1) % world))
for each in waiting:
    each.wait()
got["ring"] = values
objects = [None] * world
dist.all_gather_object(objects, f"rank {rank}")
dist.barrier()
if rank == int(os.environ.get("SHOWN", 0)):
    print(json.dumps({name: tensor.tolist() for name, tensor in got.items()} | {"objects": objects}))
    sys.stdout.flush()
dist.destroy_process_group()
