"""Small models, uneven data and explicit plans for fitted Trainers."""

import torch
from torch import Tensor

import torchvision_names  # noqa: F401

# isort: split
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tonnage.fit.plan import FitPlan
from tonnage.fit.technique import Technique


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def gpt2() -> GPT2LMHeadModel:
    """With dropout, and no batches of a step in one."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=96, bos_token_id=0, eos_token_id=0, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    )


def rows(lengths: tuple[int, ...] = (12,)) -> list[dict[str, Tensor]]:
    """Labels are left out unevenly, so that a mean over micro-batches is not the mean over tokens."""
    torch.manual_seed(1)
    found = []
    for index in range(64):
        tokens = torch.randint(0, 96, (lengths[index // 2 % len(lengths)],))
        labels = tokens.clone()
        labels[: index % 7] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def a_plan(*techniques: Technique) -> FitPlan:
    zeros = dict.fromkeys(("budget_bytes", "host_budget_bytes", "peak_bytes", "plain_peak_bytes"), 0)
    return FitPlan(techniques=techniques, device="cpu", batch_rows=8, step_s=0.0, plain_step_s=0.0, **zeros)
