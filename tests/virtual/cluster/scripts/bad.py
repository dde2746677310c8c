"""What goes wrong on a cluster, by name: meshes, calls, groups, waits and exits that do not fit together."""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sharded_heads(world):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    projection = torch.nn.Linear(60, 60).cuda()
    mesh = init_device_mesh("cuda", (world,))
    parallelize_module(projection, mesh, ColwiseParallel())(torch.randn(2, 60, device="cuda")).view(2, -1, 10)


def listens():
    server = socket.create_server(("127.0.0.1", 0))
    server.accept()


def polls(store):
    while not store.check(["ready"]):
        time.sleep(0.05)


def spawned(place, count):
    print("spawned", place, "of", count)


def before_init(how):
    if how == "another rank":
        dist.init_process_group("nccl", init_method="tcp://10.1.2.3:5555", rank=0, world_size=WORLD)
    if how == "another world":
        dist.init_process_group("nccl", init_method="tcp://10.1.2.3:5555", rank=RANK, world_size=4)
    if how == "store of another host":
        store = dist.TCPStore("10.1.2.3", 1234, WORLD, RANK == 0)
        store.set(f"from {RANK}", str(RANK))
        print(f"read {store.get(f'from {1 - RANK}').decode()}")  # in one piece: ranks share the output
    if how == "spawn":
        mp.spawn(spawned, args=(4,), nprocs=4)
    if how == "no group":
        print("alone with", torch.ones(8, device="cuda").numel())


def on_ranks(how):
    values = torch.ones(8, device="cuda")
    first = RANK == 0
    if how == "type":
        dist.all_reduce(values if first else values.half())
    if how == "order":
        for each in (values, torch.ones(16, device="cuda"))[:: 1 if first else -1]:
            dist.all_reduce(each)
    if how == "reduction":
        dist.all_reduce(values, op=dist.ReduceOp.SUM if first else dist.ReduceOp.MAX)
    if how == "root":
        dist.broadcast(values, RANK)
    if how == "group":
        pair = dist.new_group([0, 1])
        dist.all_reduce(values, group=pair if first else None)
    if how == "group on the host":
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(8), group=pair if first else None)
    if how == "receive" and first:
        dist.recv(torch.zeros(4), 1)
    if how == "receive on the card" and first:
        dist.recv(torch.zeros(4, device="cuda"), 1)


def waits(how):
    store = dist.distributed_c10d._get_default_store()
    if how == "key" and RANK == 0:
        store.wait(["nobody"])
    if how == "polling" and RANK == 0:
        polls(store)
    if how == "socket" and RANK == 0:
        listens()
    if how == "exit" and RANK == 1:
        sys.exit(0)
    if how == "exit 3" and RANK == 1:
        sys.exit(3)
    if how == "sudden end" and RANK == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(8, device="cuda"))


def meshes(how):
    if how == "mesh of threes":
        init_device_mesh("cuda", (WORLD // 3, 3))
    if how == "small mesh":
        init_device_mesh("cuda", (1, 2))
    if how == "large mesh":
        init_device_mesh("cuda", (4, 4))
    if how == "heads":
        sharded_heads(WORLD)


before_init(sys.argv[1])
if not dist.is_initialized() and sys.argv[1] not in ("spawn", "no group", "store of another host"):
    dist.init_process_group("nccl")
    on_ranks(sys.argv[1])
    meshes(sys.argv[1])
    if sys.argv[1] in ("key", "polling", "socket", "exit", "exit 3", "sudden end"):
        waits(sys.argv[1])
