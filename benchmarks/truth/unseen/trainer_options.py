"""HF Trainer with the options people toggle."""

try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)


class Images(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return {"pixel_values": torch.randn(3, 224, 224, generator=g), "labels": i % 100}


class Texts(Dataset):
    def __init__(self, longest, seq2seq):
        self.longest, self.seq2seq = longest, seq2seq

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        ids = rng.integers(5, 30000, int(rng.integers(self.longest // 4, self.longest + 1)))
        return {
            "input_ids": ids.tolist(),
            "labels": ids[: max(4, len(ids) // 3)].tolist() if self.seq2seq else int(i % 3),
        }


class Collate:
    def __init__(self, multiple):
        self.multiple = multiple

    def pad(self, rows, value):
        w = max(map(len, rows))
        w = -(-w // self.multiple) * self.multiple
        return torch.tensor([r + [value] * (w - len(r)) for r in rows])

    def __call__(self, items):
        if "pixel_values" in items[0]:
            return {
                "pixel_values": torch.stack([x["pixel_values"] for x in items]),
                "labels": torch.tensor([x["labels"] for x in items]),
            }
        ids = self.pad([x["input_ids"] for x in items], 1)
        lab = [x["labels"] for x in items]
        batch = {"input_ids": ids, "attention_mask": (ids != 1).long()}
        if isinstance(lab[0], list):
            batch["labels"] = self.pad(lab, -100)
            shifted = batch["labels"].roll(1, 1)
            shifted[:, 0] = 2
            batch["decoder_input_ids"] = shifted.masked_fill(shifted == -100, 1)
        else:
            batch["labels"] = torch.tensor(lab)
        return batch


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print(state.global_step, torch.cuda.max_memory_allocated() >> 20)


ap = argparse.ArgumentParser()
ap.add_argument("--model", default="vit", choices=["vit", "bart", "modernbert"])
ap.add_argument("--bs", type=int, default=32)
ap.add_argument("--len", type=int, default=512)
ap.add_argument("--optim", default="adamw_torch_fused")
ap.add_argument("--bf16", action="store_true")
ap.add_argument("--ckpt", action="store_true")
ap.add_argument("--accum", type=int, default=1)
ap.add_argument("--compile", action="store_true")
ap.add_argument("--smooth", type=float, default=0.0)
ap.add_argument("--eval", action="store_true")
ap.add_argument("--find", action="store_true", help="auto_find_batch_size")
a = ap.parse_args()

torch.manual_seed(0)
if a.model == "vit":
    model, data = ViTForImageClassification(ViTConfig(num_labels=100)), Images()
elif a.model == "bart":
    model, data = (
        BartForConditionalGeneration(
            BartConfig(
                d_model=768,
                encoder_layers=6,
                decoder_layers=6,
                encoder_ffn_dim=3072,
                decoder_ffn_dim=3072,
                encoder_attention_heads=12,
                decoder_attention_heads=12,
            )
        ),
        Texts(a.len, True),
    )
else:
    model = ModernBertForSequenceClassification(ModernBertConfig(num_labels=3, num_hidden_layers=12, vocab_size=50368))
    data = Texts(a.len, False)
with tempfile.TemporaryDirectory() as folder:
    targs = TrainingArguments(
        folder,
        per_device_train_batch_size=a.bs,
        per_device_eval_batch_size=a.bs * 2,
        max_steps=5,
        optim=a.optim,
        bf16=a.bf16,
        gradient_checkpointing=a.ckpt,
        gradient_accumulation_steps=a.accum,
        torch_compile=a.compile,
        label_smoothing_factor=a.smooth,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        auto_find_batch_size=a.find,
        eval_accumulation_steps=2,
        dataloader_pin_memory=True,
        max_grad_norm=1.0,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=targs,
        train_dataset=data,
        eval_dataset=torch.utils.data.Subset(data, range(a.bs * 6)),
        data_collator=Collate(64 if a.compile else 8),
        callbacks=[Report()],
    )
    trainer.train()
    if a.eval:
        print(trainer.evaluate())
