"""One pass of a part, as diffusers' own scripts and pipelines run it: a forward, a decode, or a step of training."""

from collections.abc import Callable
from typing import Any

import torch
from modules import PARTS, build, inputs, target

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
Step = Callable[[tuple[int, int, int, int]], Any]


def prepared(name: str, way: str, rank: int = 0) -> tuple[torch.nn.Module, Step]:
    """The module on the card, and what runs one pass of it at a size."""
    if way.startswith(("decode", "encode")):
        return _vae(name, way)
    wide = way.startswith("full-mixed")
    module = build(name, torch.float32 if wide else torch.bfloat16)
    if way == "forward":
        module.eval().requires_grad_(False)

        def forward(size: tuple[int, int, int, int]) -> Any:
            given = inputs(name, size, torch.bfloat16)
            with torch.no_grad():
                module(**given)

        return module, forward
    if rank:
        adapt(module, rank)
    if way.endswith("checkpoint"):
        module.enable_gradient_checkpointing()
    module.train()
    return module, lambda size: train(module, name, size, autocast=way != "full-bf16" and way != "full-bf16-checkpoint")


def adapt(module: torch.nn.Module, rank: int) -> None:
    """Adapters in FP32 on the projections of attention; the rest is frozen."""
    from peft import LoraConfig

    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=True, target_modules=TARGETS))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def train(module: torch.nn.Module, name: str, size: tuple[int, int, int, int], *, autocast: bool) -> None:
    """Forward, loss, backward."""
    given, wanted = inputs(name, size, torch.bfloat16), target(name, size, torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = module(**given, return_dict=False)[0]
    torch.nn.functional.mse_loss(out.float(), wanted.float()).backward()


def _vae(name: str, way: str) -> tuple[torch.nn.Module, Step]:
    dtype = torch.float32 if way.endswith("fp32") else torch.bfloat16
    module = build(name, dtype).eval().requires_grad_(False)
    channels, video = PARTS[name][1].get("latent_channels", 16), name == "vae-wan"

    def decode(size: tuple[int, int, int, int]) -> Any:
        batch, frames, height, width = size
        latents = torch.randn(batch, channels, *((frames,) if video else ()), height, width, device="cuda", dtype=dtype)
        with torch.no_grad():
            module.decode(latents)

    def encode(size: tuple[int, int, int, int]) -> Any:
        batch, frames, height, width = size
        pictures = (4 * frames - 3,) if video else ()
        images = torch.randn(batch, 3, *pictures, 8 * height, 8 * width, device="cuda", dtype=dtype)
        with torch.no_grad():
            module.encode(images)

    return module, decode if way.startswith("decode") else encode
