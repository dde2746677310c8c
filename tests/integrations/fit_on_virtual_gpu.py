"""Trainings that fit makes fit a budget, on the virtual GPU. In a process of its own: autograd's engine learns how many
devices there are at the first backward pass.

    python tests/integrations/fit_on_virtual_gpu.py trainer
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

import torchvision_names  # noqa: F401

# isort: split
from transformers import LlamaConfig, LlamaForCausalLM

import tonnage
from tonnage.fit.fitted import Fitted


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))


def rows() -> list[dict[str, Tensor]]:
    tokens = torch.zeros(512, dtype=torch.long)
    return [{"input_ids": tokens, "labels": tokens} for _ in range(64)]


def findings(fitted: Fitted, peak_bytes: int, steps: int) -> dict[str, Any]:
    return {
        "budget_bytes": fitted.plan.budget_bytes,
        "plain_peak_bytes": fitted.plan.plain_peak_bytes,
        "peak_bytes": peak_bytes,
        "steps": steps,
        "techniques": [technique.name for technique in fitted.techniques],
    }


def fit_trainer(folder: str, batch: int, accumulation: int, budget: str) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    with tonnage.virtual_gpu("h200"):
        arguments = TrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
            report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, bf16=True,
            logging_nan_inf_filter=False,
        )  # fmt: skip
        trainer = Trainer(model=llama(), args=arguments, train_dataset=rows())
        fitted = tonnage.fit_trainer(trainer, budget=budget)
        print(fitted)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        return findings(fitted, torch.cuda.max_memory_reserved(), trainer.state.global_step)


def fit_lightning(folder: str, batch: int, accumulation: int, budget: str) -> dict[str, Any]:
    import lightning
    from torch.utils.data import DataLoader

    from tonnage.integrations.fit_lightning import FitCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    with tonnage.virtual_gpu("h200"):
        callback = FitCallback(budget=budget)
        trainer = lightning.Trainer(
            max_steps=2, accelerator="gpu", devices=1, precision="bf16-mixed", accumulate_grad_batches=accumulation,
            default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback], gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(rows(), batch_size=batch))  # type: ignore[arg-type]
        assert callback.fitted is not None
        print(callback.fitted)
        return findings(callback.fitted, torch.cuda.max_memory_reserved(), trainer.global_step)


if __name__ == "__main__":
    run = {"trainer": fit_trainer, "lightning": fit_lightning}[sys.argv[1]]
    # A Trainer's two batches of a step may be one; Lightning's come one by one, and are smaller.
    cases = ((8, 1, "900 MiB"), (4, 2, "900 MiB" if run is fit_trainer else "640 MiB"))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({f"{case[0]}x{case[1]}": run(folder, *case) for case in cases}))
