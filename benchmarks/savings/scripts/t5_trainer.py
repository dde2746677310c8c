"""T5 with the Hugging Face Trainer for sequences."""

import tempfile

import torch
from switches import applied
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

args = applied(batch=12, seq=512)
config = T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0, use_cache=False)
model = T5ForConditionalGeneration(config)
row = {"input_ids": torch.ones(args.seq, dtype=torch.int64), "labels": torch.ones(args.seq // 4, dtype=torch.int64)}
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
trained = Seq2SeqTrainingArguments(**settings | change)
Seq2SeqTrainer(model=model, train_dataset=[row] * args.batch * 3, args=trained).train()
