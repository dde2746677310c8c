"""One case of `judge.py`, run as diffusers' scripts and pipelines run it."""

import gc
from argparse import Namespace

import torch
from modules import PARTS, build, inputs
from passes import adapt, train

from tonnage.commands.options import parser_of
from tonnage.commands.plan_diffusion import _asked
from tonnage.models.diffusion import Pipeline, Size

STEPS = 2  # the first makes the optimizer's states


def latents(size: Size, batch: int) -> tuple[int, int, int, int]:
    return batch, size.latent_frames, size.height // 8, size.width // 8


def training(options: Namespace, pipeline: Pipeline, size: Size) -> int:
    """The peak of steps of a training, with the frozen parts in the loop where they are asked for."""
    rank, batch = options.lora or 0, options.micro_batch
    wide = not rank and options.precision == "bf16-mixed"
    module = build(pipeline.denoiser, torch.float32 if wide else torch.bfloat16)
    if rank:
        adapt(module, rank)
    if options.checkpoint == "full":
        module.enable_gradient_checkpointing()
    frozen = {}
    if options.text_encoders == "frozen":
        frozen = {name: build(name, torch.bfloat16).requires_grad_(False) for name in pipeline.text}
    vae_type = torch.float32 if pipeline.vae_fp32 else torch.bfloat16
    vae = build(pipeline.vae, vae_type).requires_grad_(False) if options.vae == "frozen" else None
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for _ in range(STEPS):
        with torch.no_grad():
            for name, encoder in frozen.items():
                encoder(**inputs(name, (batch, 1, 1, pipeline.text[name]), torch.bfloat16))
            if vae is not None:
                vae.encode(torch.randn(batch, 3, size.height, size.width, device="cuda", dtype=vae_type))
        train(module, pipeline.denoiser, latents(size, batch), autocast=rank > 0 or wide)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()


@torch.no_grad()
def images(options: Namespace, pipeline: Pipeline, size: Size) -> int:
    """The peak of one pass of each part, with all on the card or one at a time; making the modules is no part of it."""
    peak = 0
    guided = pipeline.guidance != "none" and not options.no_guidance
    prompts = options.batch * (2 if guided else 1)
    at_once = options.batch * (2 if guided and pipeline.guidance == "batch" else 1)
    parts: dict[str, torch.nn.Module] = {}
    kinds = dict.fromkeys((*pipeline.text, pipeline.denoiser), torch.bfloat16)
    kinds[pipeline.vae] = torch.float32 if pipeline.vae_fp32 else torch.bfloat16
    if options.offload == "none":
        parts = {name: build(name, kind).eval() for name, kind in kinds.items()}
    for name, kind in kinds.items():
        module = parts.get(name) or build(name, kind).eval()
        torch.cuda.reset_peak_memory_stats()
        if name == pipeline.vae:
            channels = PARTS[name][1].get("latent_channels", 16)
            batch, frames, height, width = latents(size, options.batch)
            if options.vae_tiling:
                module.tile_sample_min_size, module.tile_latent_min_size = 8 * pipeline.tile, pipeline.tile
                module.enable_tiling()
            shape = (batch, channels, *((frames,) if pipeline.is_video else ()), height, width)
            module.decode(torch.randn(*shape, device="cuda", dtype=kind))
        elif name in pipeline.text:
            module(**inputs(name, (prompts, 1, 1, pipeline.text[name]), kind))
        else:
            module(**inputs(name, latents(size, at_once), kind))
        peak = max(peak, torch.cuda.max_memory_allocated())
        del module
        gc.collect()
    return peak


def run(words: str) -> int:
    """Bytes that are allocated at the peak of what the words of a plan mean."""
    what, *flags = words.split()
    options = parser_of(f"diffusion {'train' if what == 'train' else 'serve'}").parse_args(flags)
    return (training if what == "train" else images)(options, *_asked(options))
