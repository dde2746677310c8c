"""Distributed training code run by a single process: FSDP2, FSDP1, DDP or a sharded optimizer over NCCL."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--strategy", default="fsdp2", choices=["fsdp2", "fsdp1", "ddp", "zero1"])
p.add_argument("--compile", action="store_true")
p.add_argument("--bf16", action="store_true")
p.add_argument("--accumulate", type=int, default=1)
p.add_argument("--layers", type=int, default=8)
p.add_argument("--hidden", type=int, default=2048)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()

torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
config = AutoConfig.for_model("llama", vocab_size=32000, hidden_size=args.hidden, intermediate_size=args.hidden * 11 // 4,
                              num_hidden_layers=args.layers, num_attention_heads=16, num_key_value_heads=16, use_cache=False)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).cuda()
if args.compile:
    for block in model.model.layers:
        block.compile()
if args.strategy == "fsdp2":
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
elif args.strategy == "fsdp1":
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16) if args.bf16 else None
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}), mixed_precision=mixed,
                                     device_id=0, use_orig_params=True)
else:
    model = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=args.strategy == "zero1")
if args.strategy == "zero1":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    for _ in range(args.accumulate):
        ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=args.bf16 and args.strategy in ("ddp", "zero1")):
            loss = model(input_ids=ids, labels=ids).loss / args.accumulate
        loss.backward()
    if args.strategy == "fsdp1":
        model.clip_grad_norm_(1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(step, total.item(), torch.cuda.max_memory_allocated() // 2**20)
dist.destroy_process_group()
