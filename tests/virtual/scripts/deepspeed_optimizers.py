"""DeepSpeed's optimizers, whose operators it would compile: prints what each one keeps, and runs an engine with them."""
import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from deepspeed.ops.op_builder import QuantizerBuilder

for kind in (FusedAdam, FusedLamb, FusedLion):
    layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    layer.weight.grad = torch.ones_like(layer.weight)
    before = torch.cuda.memory_allocated()
    optimizer = kind(layer.parameters())
    optimizer.step()
    print(kind.__name__, torch.cuda.memory_allocated() - before)
    del optimizer, layer
layer = torch.nn.Linear(8, 8)
layer(torch.ones(1, 8)).sum().backward()
DeepSpeedCPUAdam(layer.parameters()).step()
try:
    QuantizerBuilder().load()
except Exception as error:
    print(f"{type(error).__name__}: {error}")

os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
for stage, offload in ((1, False), (2, True), (3, False), (3, True)):
    zero = {"stage": stage, "stage3_max_live_parameters": 0} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    settings = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "zero_optimization": zero}
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for _ in range(2):
        engine.backward(engine(torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)).sum())
        engine.step()
    print("engine", stage, type(optimizer.optimizer).__name__)
