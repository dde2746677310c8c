"""Fine-tunes a causal model as PEFT's comparison of methods does, on batches of given lengths, and writes what it reads.

    python peft_metamath.py SETTINGS.json READINGS.json

The settings have the folder of the model, the adapter's configuration (none: everything is trained), the optimizer and the
lengths to which the batches are padded, as lists: the cache is emptied after each list.
"""

import json
import sys
from itertools import accumulate, chain
from pathlib import Path

import torch
from peft import PeftConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from transformers import AutoModelForCausalLM

BATCH = 4
WIKI_TOKENS = 768


def tokens(length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """A batch that is padded to a length: the first sample fills it."""
    ids = torch.randint(vocabulary, (BATCH, length))
    return {"input_ids": ids.cuda(), "attention_mask": torch.ones_like(ids).cuda()}


def load(folder: str, adapter: dict, autocast_adapter: bool) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.bfloat16)
    if not adapter:
        return model
    model = get_peft_model(model, PeftConfig.from_peft_type(**adapter), autocast_adapter_dtype=autocast_adapter)
    freeze_ranks(model)
    return model


def freeze_ranks(model: torch.nn.Module) -> None:
    """AdaLoRA's ranks need no gradient in PEFT 0.19, by the published counts of what is trained; in 0.21 they have one."""
    for name, parameter in model.named_parameters():
        if ".ranknum." in name:
            parameter.requires_grad_(False)


def optimizer_of(model: torch.nn.Module, kind: str, options: dict) -> torch.optim.Optimizer:
    if kind == "lora-fa":
        return create_lorafa_optimizer(model, **options)
    return getattr(torch.optim, kind)(model.parameters(), **options)


@torch.inference_mode()
def loss_on_articles(model: torch.nn.Module) -> None:
    batch = tokens(WIKI_TOKENS, model.config.vocab_size)
    logits = model(**batch).logits
    for logit, target in zip(logits, batch["input_ids"], strict=True):
        torch.nn.functional.cross_entropy(logit[:-1], target[1:], reduction="none")


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: dict, before: int) -> list[int]:
    """What is allocated at the end of each step; the cache is emptied after each run of steps."""
    allocated = []
    for step, length in enumerate(chain(*settings["lengths"]), 1):
        batch = tokens(length, model.config.vocab_size)
        batch["labels"] = batch["input_ids"].clone()
        count = batch["attention_mask"].sum().item()
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=count)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["grad_norm_clip"])
        optimizer.step()
        if settings["adapter"].get("peft_type") in ("ADALORA", "ADAMSS"):
            model.base_model.update_and_allocate(step)
        allocated.append(torch.cuda.memory_allocated() - before)
        if step in accumulate(map(len, settings["lengths"])):
            torch.cuda.empty_cache()
    return allocated


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    torch.nn.Linear(1, 1).to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_reserved()
    model = load(settings["model"], settings["adapter"], settings["autocast_adapter_dtype"])
    optimizer = optimizer_of(model, settings["optimizer_type"], settings["optimizer_kwargs"])
    model.eval()
    if settings["adapter"]:
        with model.disable_adapter():
            loss_on_articles(model)
    else:
        loss_on_articles(model)
    model.train()
    allocated = train(model, optimizer, settings, before)
    readings = {"allocated": allocated, "reserved_max": torch.cuda.max_memory_reserved() - before}
    Path(sys.argv[2]).write_text(json.dumps(readings))


main()
