"""Largest batches and longest sequences of a small Llama on the virtual GPU, as JSON.

In a process of its own: autograd's engine learns how many devices there are at the first backward pass, and other tests
have had theirs on the CPU.
"""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import torchvision_names  # noqa: F401

# isort: split
import numpy as np
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tonnage
from tonnage.errors import TonnageError
from tonnage.fit.modules import find_blocks
from tonnage.fit.plan import FitPlan
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.survey.resident_state import find_resident_state
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training

BUDGET = "6 GiB"
BUDGETS = {"float": 2.0**31, "numpy": np.float32(2**31), "share": "1.5%"}
BAD_BUDGETS = ["eighty", -5, 0, float("nan"), "120%", True]


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


def _caching() -> dict[str, nn.Module]:
    """Tiny ones that keep keys and values, as transformers makes them unless told."""
    llama = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    gpt2 = GPT2Config(
        vocab_size=4096, n_embd=256, n_layer=3, n_head=8, n_positions=4096, bos_token_id=0, eos_token_id=0
    )
    with torch.device("cuda"):
        return {"llama": LlamaForCausalLM(llama).train(), "gpt2": GPT2LMHeadModel(gpt2).train()}


def _resident(model: nn.Module, sample: Any) -> dict[str, Any]:
    """What a training holds, with a scheduler and a hook before its step."""
    device = torch.device("cuda")

    def find(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        training = Training(
            model=model, optimizer=optimizer, loss=_loss, sample=sample, device=device, stepper=Stepper(optimizer)
        )
        return asdict(find_resident_state(training, GpuMeter(device), find_blocks(model), 0))

    plain, scheduled, hooked = (torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for _ in range(3))
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    hooked.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 1.0))
    found = {"plain": find(plain), "scheduled": find(scheduled), "hooked": find(hooked)}
    parameters_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    return {**found, "parameters": parameters_bytes, "allocated": torch.cuda.memory_allocated()}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def _plan(*techniques: Technique) -> FitPlan:
    sizes = dict.fromkeys(("budget_bytes", "host_budget_bytes", "peak_bytes", "plain_peak_bytes", "batch_rows"), 0)
    return FitPlan(techniques=techniques, device="", step_s=0.0, plain_step_s=0.0, **sizes)


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
        "caches": bool(model.config.use_cache),
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def main() -> None:
    found: dict[str, Any] = {}
    gc.freeze()  # what was imported: each answer takes a garbage collection
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
        for name, caching in _caching().items():
            for look in (tonnage.largest_batch, tonnage.longest_sequence):
                found[f"{name}, {look.__name__}"] = ask(look, caching, budget="2 GiB")
        found["free"] = GpuMeter(torch.device("cuda")).free_bytes()
        found["budgets"] = {name: ask(tonnage.largest_batch, caching, budget=b) for name, b in BUDGETS.items()}
        found["bad budgets"] = [
            _problem(partial(ask, tonnage.largest_batch, caching, budget=budget)) for budget in BAD_BUDGETS
        ]
        found["resident"] = _resident(model, sample)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
