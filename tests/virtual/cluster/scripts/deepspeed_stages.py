"""DeepSpeed's ZeRO stages one after another, each with a plain AdamW."""

import os

import deepspeed
import torch
from small_model import WIDTH, Network, loss_of

deepspeed.init_distributed("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
for stage in (1, 2, 3):
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
    }
    model = Network()
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for _ in range(4):
        engine.backward(loss_of(engine, torch.randn(8, WIDTH, device=engine.device, dtype=torch.bfloat16)))
        engine.step()
    if torch.distributed.get_rank() == 0:
        print("stage", stage, "peak", torch.cuda.max_memory_allocated())
    engine.destroy()
    del model, optimizer, engine
