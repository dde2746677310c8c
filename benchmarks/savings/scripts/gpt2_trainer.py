"""GPT-2 with the Hugging Face Trainer."""

import tempfile

import torch
from switches import applied
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

args = applied(batch=12, seq=512)
rows = [{"input_ids": torch.arange(args.seq) % 50257} for _ in range(args.batch * 3)]
rows = [row | {"labels": row["input_ids"]} for row in rows]
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", use_cache=False))
change = {
    "batch": {"per_device_train_batch_size": args.batch // 2, "gradient_accumulation_steps": 2},
    "checkpoint": {"gradient_checkpointing": True},
    "autocast": {"bf16": True},
    "fused": {"optim": "adamw_torch_fused"},
    "eight-bit": {"optim": "adamw_8bit"},
}.get(args.apply, {})
settings = {
    "per_device_train_batch_size": args.batch, "optim": "adamw_torch", "max_steps": 3, "report_to": [],
    "save_strategy": "no", "logging_steps": 1, "output_dir": tempfile.mkdtemp(),
}  # fmt: skip
Trainer(model=model, train_dataset=rows, args=TrainingArguments(**settings | change)).train()
