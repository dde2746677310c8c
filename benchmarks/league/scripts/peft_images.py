"""Fine-tunes FLUX.2 klein (4B) as PEFT's comparison of methods does, for a few steps, and writes what it reads.

    python peft_images.py SETTINGS.json READINGS.json

The settings have the adapter's configuration (none: everything is trained) and the optimizer.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from peft import PeftConfig, get_peft_model
from transformers import Dinov2Config, Dinov2Model, Qwen3Config, Qwen3ForCausalLM

KLEIN = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False,
}  # fmt: skip
QWEN3_4B = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
BATCH, PICTURES, RESOLUTION, PROMPT_TOKENS, STEPS = 2, 14, 512, 512, 3
ENCODER_LAYERS = (10, 20, 30)
SIDE = RESOLUTION // 16  # tokens


def on_host(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """A module on the host whose weights are whatever the memory held."""
    with torch.device("meta"):
        module = make()
    return module.to(dtype).to_empty(device="cpu")


def adapted(settings: dict) -> torch.nn.Module:
    """The transformer with its adapter, which is made on the GPU and waits on the host."""
    transformer = on_host(lambda: Flux2Transformer2DModel(**KLEIN), torch.bfloat16)
    transformer.enable_gradient_checkpointing()
    transformer.to("cuda")
    if settings["adapter"]:
        adapter = PeftConfig.from_peft_type(**settings["adapter"])
        transformer = get_peft_model(transformer, adapter, autocast_adapter_dtype=settings["autocast_adapter_dtype"])
        for name, parameter in transformer.named_parameters():
            if ".ranknum." in name:  # AdaLoRA's: PEFT 0.19, which was measured, freezes them, and 0.21 does not
                parameter.requires_grad_(False)
    transformer.to("cpu")
    torch.cuda.empty_cache()
    return transformer.train()


@torch.no_grad()
def encoded_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and positions of the prompts; the text encoder is on the GPU for as long as it takes."""
    encoder = on_host(lambda: Qwen3ForCausalLM(Qwen3Config(**QWEN3_4B)), torch.bfloat16).eval().to("cuda")
    prompts = []
    for _ in range(PICTURES):
        ids = torch.zeros(1, PROMPT_TOKENS, dtype=torch.long, device="cuda")
        if not prompts:
            mask = torch.ones_like(ids)
            states = encoder(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
            chosen = torch.stack([states[layer] for layer in ENCODER_LAYERS], dim=1)
            del states
        prompts.append(chosen.permute(0, 2, 1, 3).reshape(1, PROMPT_TOKENS, -1))
    del chosen
    encoder.to("cpu")
    positions = torch.zeros(PICTURES, PROMPT_TOKENS, 4, dtype=torch.long, device="cuda")
    return torch.cat(prompts), positions


@torch.no_grad()
def encoded_pictures() -> torch.Tensor:
    vae = on_host(AutoencoderKLFlux2, torch.bfloat16).eval().to("cuda")
    latents = []
    for _ in range(PICTURES // BATCH):
        pixels = torch.zeros(BATCH, 3, RESOLUTION, RESOLUTION, dtype=torch.bfloat16, device="cuda")
        if not latents:
            vae.encode(pixels).latent_dist.mode()
        latents.append(torch.zeros(BATCH, 128, SIDE, SIDE, dtype=torch.bfloat16, device="cuda"))
    vae.to("cpu")
    return torch.cat(latents)


def unpacked(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Tokens put back in their places, one sample after the other."""
    pictures = []
    for sample, places in zip(tokens, positions, strict=True):
        canvas = torch.zeros(SIDE * SIDE, sample.shape[1], device="cuda", dtype=sample.dtype)
        flat = places[:, 1] * SIDE + places[:, 2]
        canvas.scatter_(0, flat.unsqueeze(1).expand(-1, sample.shape[1]), sample)
        pictures.append(canvas.view(SIDE, SIDE, -1).permute(2, 0, 1))
    return torch.stack(pictures)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    torch.nn.Linear(1, 1).to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_reserved()
    transformer = adapted(settings)
    judge = on_host(lambda: Dinov2Model(Dinov2Config()), torch.float32).to("cuda").eval()
    optimizer = torch.optim.AdamW(transformer.parameters(), **settings["optimizer_kwargs"])
    prompts, text_positions = encoded_prompts()
    latents = encoded_pictures()
    transformer.to("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    allocated, losses = [], []
    for step in range(1, STEPS + 1):
        chosen = torch.arange(BATCH, device="cuda")
        clean, prompt, text = (each.index_select(0, chosen) for each in (latents, prompts, text_positions))
        places = torch.cartesian_prod(torch.arange(1), torch.arange(SIDE), torch.arange(SIDE), torch.arange(1))
        positions = places.expand(BATCH, -1, -1).to("cuda")
        noise = torch.randn_like(clean)
        times = torch.rand(BATCH).to("cuda") * 1000
        sigmas = torch.rand(BATCH, 1, 1, 1, dtype=clean.dtype).to("cuda")
        noisy = (1.0 - sigmas) * clean + sigmas * noise
        packed = noisy.reshape(BATCH, 128, -1).permute(0, 2, 1)
        optimizer.zero_grad(set_to_none=True)
        said = transformer(
            hidden_states=packed, timestep=times / 1000, guidance=None, encoder_hidden_states=prompt, txt_ids=text,
            img_ids=positions, return_dict=False,
        )[0]  # fmt: skip
        said = unpacked(said[:, : packed.size(1)], positions)
        weighting = torch.ones_like(sigmas)
        target = noise - clean
        loss = torch.mean((weighting.float() * (said.float() - target.float()) ** 2).reshape(BATCH, -1), 1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), settings["grad_norm_clip"])
        optimizer.step()
        if settings["adapter"].get("peft_type") == "ADALORA":
            transformer.base_model.update_and_allocate(step)
        loss = loss.detach()
        losses.append(loss)
        allocated.append(torch.cuda.memory_allocated() - before)
    readings = {"allocated": allocated, "reserved_max": torch.cuda.max_memory_reserved() - before}
    judge.to("cpu")  # which sat beside all of it
    Path(sys.argv[2]).write_text(json.dumps(readings))


main()
