"""Fine-tunes with transformers' Trainer on samples of many lengths: `python benchmarks/certify/trainer.py`."""

import argparse
import random
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
add = parser.add_argument
add("--samples", type=int, default=480)
add("--batch", type=int, default=8)
add("--accumulate", type=int, default=1)
add("--longest", type=int, default=1536)
add("--spread", type=float, default=0.8)
add("--eval-every", type=int, default=0)
add("--save-every", type=int, default=0)
add("--checkpointing", action="store_true")
add("--grouped", action="store_true")
add("--seed", type=int, default=0)
add("--cap", type=float, default=0.0, metavar="GIB")
options = parser.parse_args()


class Samples(Dataset):
    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.lengths = [
            min(max(int(draw.lognormvariate(5.2, options.spread)), 4), options.longest) for _ in range(count)
        ]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, at):
        draw = torch.Generator().manual_seed(at)
        return {"input_ids": torch.randint(3, 32000, (self.lengths[at],), generator=draw), "length": self.lengths[at]}


def padded(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length], mask[row, :length] = sample["input_ids"], 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Progress(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print(f"step {state.global_step}", flush=True)

    def on_evaluate(self, args, state, control, **_):
        print(f"evaluated after step {state.global_step}", flush=True)

    def on_save(self, args, state, control, **_):
        print(f"saved after step {state.global_step}", flush=True)


def main():
    torch.manual_seed(options.seed)
    if options.cap:
        torch.cuda.set_per_process_memory_fraction(options.cap * 2**30 / torch.cuda.mem_get_info()[1])
    config = AutoConfig.for_model(
        "qwen2", hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=32000,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=options.batch, gradient_accumulation_steps=options.accumulate, bf16=True,
            num_train_epochs=1, logging_strategy="no", report_to=[], disable_tqdm=True, seed=options.seed,
            eval_strategy="steps" if options.eval_every else "no", eval_steps=options.eval_every or None,
            save_strategy="steps" if options.save_every else "no", save_steps=options.save_every or 500, save_total_limit=1,
            gradient_checkpointing=options.checkpointing,
            train_sampling_strategy="group_by_length" if options.grouped else "random", length_column_name="length",
            remove_unused_columns=False, prediction_loss_only=False,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, data_collator=padded, train_dataset=Samples(options.samples, options.seed),
            eval_dataset=Samples(48, options.seed + 7), callbacks=[Progress()],
        )  # fmt: skip
        trainer.train()
    print("done", flush=True)


main()
