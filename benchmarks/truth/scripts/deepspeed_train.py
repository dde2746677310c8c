"""DeepSpeed's engine on a single rank: ZeRO of any stage, with an optimizer of torch on the GPU or, offloaded, on the host."""
import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--stage", type=int, default=2, choices=[0, 1, 2, 3])
p.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
p.add_argument("--offload", action="store_true", help="keep the optimizer on the host")
p.add_argument("--offload-parameters", action="store_true")
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--accumulate", type=int, default=1)
p.add_argument("--layers", type=int, default=8)
p.add_argument("--hidden", type=int, default=2048)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()

os.environ["LOCAL_RANK"] = "0"
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed(dist_init_required=False)
zero = {"stage": args.stage}
if args.offload:
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
if args.offload_parameters:
    zero["offload_param"] = {"device": "cpu", "pin_memory": True}
settings = {
    "train_micro_batch_size_per_gpu": args.batch, "gradient_accumulation_steps": args.accumulate, "gradient_clipping": 1.0,
    "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": args.precision == "bf16"}, "fp16": {"enabled": args.precision == "fp16", "initial_scale_power": 8},
}  # fmt: skip
torch.manual_seed(0)
config = AutoConfig.for_model("llama", vocab_size=32000, hidden_size=args.hidden, intermediate_size=args.hidden * 11 // 4,
                              num_hidden_layers=args.layers, num_attention_heads=16, num_key_value_heads=16, use_cache=False)
with deepspeed.zero.Init(config_dict_or_path=settings, enabled=args.stage == 3):
    model = AutoModelForCausalLM.from_config(config)
if args.checkpoint:
    model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
for step in range(3):
    for _ in range(args.accumulate):
        ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
dist.destroy_process_group()
