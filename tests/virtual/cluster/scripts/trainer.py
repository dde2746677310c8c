"""The transformers Trainer under torchrun, with fsdp, evaluation and a checkpoint in the folder that is named."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

config = AutoConfig.for_model(
    "llama", vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"input_ids": torch.arange(64), "labels": torch.arange(64)}


arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    max_steps=2,
    bf16=True,
    report_to=[],
    disable_tqdm=True,
    save_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    fsdp=True,
    fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=Tokens(), eval_dataset=Tokens()).train()
print("world", torch.distributed.get_world_size())
