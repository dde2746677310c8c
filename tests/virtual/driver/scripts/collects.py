"""Sizes that depend on known values, and values that pass through a collective of a group of one."""

import torch
import torch.distributed as dist

assert torch.tensor([[1, 24, 24], [1, 2, 4]]).cuda().prod(-1).tolist() == [576, 8]
bounds = torch.tensor([0, 4, 4, 9], dtype=torch.int32).cuda().unique_consecutive()
assert (bounds[1:] - bounds[:-1]).tolist() == [4, 5]
wide = torch.tensor([True, False, True]).cuda()[:, None, None].expand(3, 2048, 1024)
assert wide.nonzero().shape == (2 * 2048 * 1024, 3)
sparse = torch.sparse_coo_tensor([[1, 3, 1], [0, 2, 0]], [1.0, 2.0, 3.0], (4, 4), device="cuda").coalesce()
assert sparse.indices().tolist() == [[1, 3], [0, 2]]

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
given, taken = torch.tensor([7, 8]).cuda(), torch.zeros(2, dtype=torch.int64, device="cuda")
dist.all_gather([taken], given)
assert taken.tolist() == [7, 8]
dist.destroy_process_group()
