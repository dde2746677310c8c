"""A small model on a mesh, by the layout that is named: fsdp, hsdp, tensor, pipeline, context, expert, composed."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("layout")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--split", type=int, default=2)
parser.add_argument("--schedule", default="1f1b", choices=["1f1b", "gpipe"])
args = parser.parse_args()

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def blocks(count):
    return nn.Sequential(*(Block(args.width) for _ in range(count)))


def train(model, batch=8):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(batch, args.width, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp(mesh):
    model = blocks(args.blocks).to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model)


def tensor():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = blocks(args.blocks).to(device)
    mesh = init_device_mesh("cuda", (world,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(model)


def pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage_model = blocks(2 if rank == 0 else 1).to(device)
    stage = PipelineStage(stage_model, rank, world, device)
    kind = Schedule1F1B if args.schedule == "1f1b" else ScheduleGPipe
    schedule = kind(stage, n_microbatches=4, loss_fn=lambda y, t: F.mse_loss(y, t))
    optimizer = torch.optim.AdamW(stage_model.parameters())
    for _ in range(2):
        inputs = (torch.randn(32, args.width, device=device),) if rank == 0 else ()
        target = torch.randn(32, args.width, device=device) if rank == world - 1 else None
        schedule.step(*inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()


def composed():
    """Stages of a pipeline, each sharded over its ranks, with the matrices of a block split between neighbours."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    stages, split = args.stages, args.split
    mesh = init_device_mesh("cuda", (stages, world // stages // split, split), mesh_dim_names=("pp", "dp", "tp"))
    place = mesh["pp"].get_local_rank()
    model = blocks(2 if place == 0 else 1).to(device)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, place, stages, device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=2 * stages, loss_fn=lambda y, t: F.mse_loss(y, t))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        inputs = (torch.randn(4 * stages, args.width, device=device),) if place == 0 else ()
        target = torch.randn(4 * stages, args.width, device=device) if place == stages - 1 else None
        schedule.step(*inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()


def context():
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(1, 8, 1024, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={q, k, v}):
        for each in (q, k, v):
            each.requires_grad_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def expert():
    own = blocks(1).to(device)
    tokens = torch.randn(64 * world, args.width, device=device, requires_grad=True)
    counts = torch.full((world,), 64, device=device)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sizes = arriving.tolist()
    from torch.distributed.nn.functional import all_to_all_single

    got = all_to_all_single(torch.empty(sum(sizes), args.width, device=device), tokens, sizes, counts.tolist())
    back = all_to_all_single(torch.empty_like(tokens), own(got), counts.tolist(), sizes)
    back.sum().backward()
    assert sizes == [64] * world, sizes


if args.layout == "fsdp":
    fsdp(init_device_mesh("cuda", (world,)))
elif args.layout == "hsdp":
    fsdp(init_device_mesh("cuda", (2, -(-world // 2)), mesh_dim_names=("replicate", "shard")))
else:
    kinds = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert, "composed": composed}
    kinds[args.layout]()
if rank == 0:
    print("peak", torch.cuda.max_memory_allocated())
dist.destroy_process_group()
