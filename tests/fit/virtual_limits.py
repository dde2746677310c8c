"""Largest batches and longest sequences of a small Llama on the virtual GPU, as JSON.

In a process of its own: autograd's engine learns how many devices there are at the first backward pass, and other tests
have had theirs on the CPU.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import torchvision_names  # noqa: F401

# isort: split
from transformers import LlamaConfig, LlamaForCausalLM

import tonnage
from tonnage.errors import TonnageError
from tonnage.fit.plan import Plan
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward

BUDGET = "6 GiB"


def _llama(attention: str = "sdpa") -> nn.Module:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
        attn_implementation=attention,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def _plan(*techniques: Technique) -> Plan:
    sizes = dict.fromkeys(("budget_bytes", "host_budget_bytes", "peak_bytes", "plain_peak_bytes", "batch_rows"), 0)
    return Plan(techniques=techniques, device="", step_s=0.0, plain_step_s=0.0, **sizes)


def _problem(call: Callable[[], object]) -> str:
    try:
        call()
    except TonnageError as error:
        return f"{type(error).__name__}: {error.words}"
    return "nothing"


def _traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of what must be as it was."""
    return {
        "states": len(optimizer.state),
        "gradients": sum(parameter.grad is not None for parameter in model.parameters()),
        "forwards": sum("forward" in module.__dict__ for module in model.modules()),
        "hooks": sum(len(module._forward_hooks) for module in model.modules()),
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def main() -> None:
    found: dict[str, Any] = {}
    with tonnage.virtual_gpu("h200"):
        model, eager = _llama(), _llama("eager")
        tokens = torch.zeros(2, 512, dtype=torch.long, device="cuda")
        sample = {"input_ids": tokens, "labels": tokens}

        def ask(search: Callable[..., Any], model: nn.Module, **settings: Any) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            before = _traces(model, optimizer)
            answer = search(model, optimizer, **{"loss": _loss, "sample": sample, "budget": BUDGET} | settings)
            return {**asdict(answer), "unchanged": _traces(model, optimizer) == before}

        found["batch"] = ask(tonnage.largest_batch, model)
        found["sequence"] = ask(tonnage.longest_sequence, model)
        found["eager sequence"] = ask(tonnage.longest_sequence, eager)
        found["batch of the card"] = ask(tonnage.largest_batch, model, budget=None)
        found["at most"] = ask(tonnage.largest_batch, model, at_most=7, multiple_of=2)
        recomputed = _plan(ChunkedLoss(), Recompute.every(model, 2), StepInBackward())
        found["batch under a plan"] = ask(tonnage.largest_batch, model, fitted=recomputed)
        found["micro-batches"] = ask(tonnage.largest_batch, model, fitted=_plan(MicroBatches(count=2)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        fitted = tonnage.fit(model, optimizer, loss=_loss, sample=sample, budget="2 GiB", host="8 GiB")
        search = {"loss": _loss, "sample": sample, "budget": BUDGET, "fitted": fitted}
        found["sequence when fitted"] = asdict(tonnage.longest_sequence(model, optimizer, **search))
        fitted.step(sample)
        found["another optimizer"] = _problem(lambda: ask(tonnage.largest_batch, model, fitted=fitted))
        fitted.undo()
        found["too small"] = _problem(lambda: ask(tonnage.largest_batch, model, budget="500 MiB"))
        found["too large"] = _problem(lambda: ask(tonnage.largest_batch, model, budget="1 TiB"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
