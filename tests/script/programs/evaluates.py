"""Trains a small Llama with the Trainer of transformers, which evaluates and saves every second step: [VOCABULARY]."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=int(sys.argv[1]) if sys.argv[1:] else 32000))
ids = torch.zeros(512, dtype=torch.long)
samples = [{"input_ids": ids, "labels": ids} for _ in range(64)]
batches = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
every = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, **batches, **every, report_to=[], disable_tqdm=True)
    trainer = Trainer(
        model, arguments, train_dataset=samples, eval_dataset=samples, compute_metrics=lambda found: {"seen": 64}
    )
    trainer.train()
