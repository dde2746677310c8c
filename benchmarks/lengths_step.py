"""An epoch of steps over samples of many lengths, for `tonnage run`: the case comes as JSON in the first argument.

Its micro-batches are lists of lengths. Padded ones are as long as their longest; others lie one after the other, and
FlashAttention keeps their samples apart.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def inputs_of(lengths: list[int], *, padded: bool) -> dict[str, Any]:
    """One micro-batch."""
    if padded:
        ids = torch.randint(10, 1000, (len(lengths), max(lengths)), device="cuda")
        return {"input_ids": ids, "labels": ids}
    ids = torch.randint(10, 1000, (1, sum(lengths)), device="cuda")
    places = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    return {"input_ids": ids, "labels": ids, "position_ids": places}


def main() -> None:
    case = json.loads(sys.argv[1])
    config = dict(case["config"])
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    attention = "sdpa" if case["padded"] else "flash_attention_2"
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    if case["checkpoint"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for lengths in case["batches"]:
        model(**inputs_of(lengths, padded=case["padded"]), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
