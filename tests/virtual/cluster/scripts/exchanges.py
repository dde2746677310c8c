"""Values that travel between ranks: objects, counts on the card, host tensors, the store."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
everybody = [None] * world
dist.all_gather_object(everybody, {"rank": rank})
assert [each["rank"] for each in everybody] == list(range(world)), everybody
settings = [{"seed": 5}] if rank == 0 else [None]
dist.broadcast_object_list(settings)
assert settings[0]["seed"] == 5
count = torch.tensor([rank + 1], device="cuda")
dist.all_reduce(count)
host = dist.new_group(backend="gloo")
largest = torch.tensor([float(rank)])
dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=host)
parts = list(torch.full((world,), rank).chunk(world))
swapped = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
dist.all_to_all(swapped, parts, group=host)
dist.monitored_barrier(host)
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("word", "hello")
word = store.get("word").decode()
if rank == 0:
    print("sum", count.item(), "largest", largest.item(), "swapped", [int(part) for part in swapped], word)
dist.destroy_process_group()
