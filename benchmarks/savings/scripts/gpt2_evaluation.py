"""GPT-2 with the Hugging Face Trainer, which keeps the predictions of its evaluation."""

import tempfile

import torch
from switches import applied
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

args = applied(batch=4, seq=256)
rows = [{"input_ids": torch.arange(args.seq) % 50257} for _ in range(args.batch * 24)]
rows = [row | {"labels": row["input_ids"]} for row in rows]
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", use_cache=False))
change = {"predictions": {"eval_accumulation_steps": 1}, "eval-batch": {"per_device_eval_batch_size": args.batch}}
settings = {
    "per_device_train_batch_size": args.batch, "per_device_eval_batch_size": args.batch * 2, "optim": "adamw_torch",
    "max_steps": 2, "report_to": [], "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2,
    "output_dir": tempfile.mkdtemp(),
}  # fmt: skip
Trainer(
    model=model, train_dataset=rows, eval_dataset=rows, compute_metrics=lambda _: {},
    args=TrainingArguments(**settings | change.get(args.apply, {})),
).train()  # fmt: skip
