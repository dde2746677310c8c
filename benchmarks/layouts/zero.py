"""The stages of ZeRO under torchrun, as its paper counts them: BF16 parameters and gradients, 12 bytes of FP32 for Adam.

    torchrun --nproc-per-node 8 zero.py --model zero.json --stage 2

Stage 0 is DDP, stage 1 DDP with `ZeroRedundancyOptimizer`, stages 2 and 3 are FSDP2 without and with gathering again. A few
tokens are enough: what is asked for is parameters, gradients and optimizer states.
"""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 2


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on an FP32 copy of each BF16 parameter, one parameter at a time."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = 0
            state["master"] = parameter.float()
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["step"] += 1
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        del gradient
        size = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        state["master"].mul_(1 - group["lr"] * group["weight_decay"])
        state["master"].addcdiv_(state["exp_avg"], size, value=-group["lr"] / (1 - first ** state["step"]))
        parameter.copy_(state["master"])


def main() -> None:
    """Two steps, so that all states are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a config.json")
    parser.add_argument("--stage", type=int, choices=range(4), required=True)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    config = AutoConfig.for_model(**json.loads(Path(options.model).read_text()), use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model, optimizer = laid_out(model, options.stage)
    for _ in range(STEPS):
        ids = torch.randint(0, 1000, (1, 128), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def laid_out(model: Any, stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer in one stage."""
    if stage >= 2:
        for block in model.model.layers:
            fully_shard(block, reshard_after_forward=stage == 3)
        fully_shard(model, reshard_after_forward=stage == 3)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).cuda()
    if stage >= 2:
        return model, MasterAdamW(model.parameters())
    copied = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    if stage == 0:
        return copied, MasterAdamW(copied.parameters())
    return copied, ZeroRedundancyOptimizer(copied.parameters(), optimizer_class=MasterAdamW)


if __name__ == "__main__":
    main()
