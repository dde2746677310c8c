import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29501", rank=0, world_size=1)
wrapped = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[0])
wrapped(torch.randn(4, 64, device="cuda")).sum().backward()
sharded = fully_shard(nn.Linear(64, 64).cuda())
sharded(torch.randn(4, 64, device="cuda")).sum().backward()
counts = torch.tensor([3, 4], device="cuda")
dist.all_reduce(counts)
gathered = [None]
dist.all_gather_object(gathered, {"rank": dist.get_rank()})
dist.barrier()
assert counts.tolist() == [3, 4] and gathered == [{"rank": 0}] and dist.get_world_size() == 1
dist.destroy_process_group()
