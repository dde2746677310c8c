"""Train a diffusion model of diffusers: a conditional U-Net, or a transformer (DiT, SD3, Flux) by flow matching."""
import argparse

import torch
import torch.nn.functional as F
from diffusers import (DDPMScheduler, DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel,
                       SD3Transformer2DModel, UNet2DConditionModel)
from diffusers.training_utils import EMAModel

p = argparse.ArgumentParser()
p.add_argument("--model", default="unet", choices=["unet", "dit", "sd3", "flux"])
p.add_argument("--precision", default="amp-bf16", choices=["fp32", "bf16", "amp-bf16", "amp-fp16"])
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--ema", action="store_true")
p.add_argument("--xformers", action="store_true", help="attend with xformers")
p.add_argument("--lora", type=int, default=0, help="rank; 0 trains all weights")
p.add_argument("--batch", type=int, default=8)
p.add_argument("--latent", type=int, default=64)
args = p.parse_args()
torch.manual_seed(0)


def build():
    if args.model == "unet":
        return UNet2DConditionModel(sample_size=args.latent, block_out_channels=(192, 384, 768, 768), cross_attention_dim=768)
    if args.model == "dit":
        return DiTTransformer2DModel(num_attention_heads=16, attention_head_dim=64, num_layers=12, sample_size=args.latent, out_channels=4)
    if args.model == "sd3":
        return SD3Transformer2DModel(sample_size=args.latent, num_layers=8, num_attention_heads=16, caption_projection_dim=1024,
                                     joint_attention_dim=2048, pooled_projection_dim=1024, qk_norm="rms_norm")
    return FluxTransformer2DModel(num_layers=3, num_single_layers=6, num_attention_heads=12, joint_attention_dim=2048,
                                  guidance_embeds=True)


weights = torch.bfloat16 if args.precision == "bf16" else torch.float32
model = build().to("cuda", weights)
if args.checkpoint:
    model.enable_gradient_checkpointing()
if args.xformers:
    model.enable_xformers_memory_efficient_attention()
if args.lora:
    from peft import LoraConfig

    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=args.lora, lora_alpha=args.lora, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
model.train()
params = [q for q in model.parameters() if q.requires_grad]
ema = EMAModel(model.parameters(), decay=0.999) if args.ema else None
optimizer = torch.optim.AdamW(params, lr=1e-4)
amp = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}.get(args.precision)
scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "amp-fp16")
noising = DDPMScheduler() if args.model in ("unet", "dit") else FlowMatchEulerDiscreteScheduler()


def predict(latents, noise):
    n = args.batch
    if args.model in ("unet", "dit"):
        t = torch.randint(0, 1000, (n,), device="cuda")
        noisy = noising.add_noise(latents, noise, t)
        if args.model == "dit":
            return model(noisy, timestep=t, class_labels=torch.randint(0, 1000, (n,), device="cuda")).sample, noise
        text = torch.randn(n, 77, 768, device="cuda", dtype=weights)
        return model(noisy, t, encoder_hidden_states=text).sample, noise
    sigma = torch.rand(n, 1, 1, 1, device="cuda", dtype=weights)
    noisy, target = (1 - sigma) * latents + sigma * noise, noise - latents
    text = torch.randn(n, 256, 2048, device="cuda", dtype=weights)
    t = sigma.flatten() * 1000
    if args.model == "sd3":
        pooled = torch.randn(n, 1024, device="cuda", dtype=weights)
        return model(noisy, timestep=t, encoder_hidden_states=text, pooled_projections=pooled).sample, target
    side = args.latent // 2
    packed = [y.view(n, 16, side, 2, side, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, side * side, 64) for y in (noisy, target)]
    places = torch.zeros(side * side, 3, device="cuda", dtype=weights)
    places[:, 1] = torch.arange(side * side, device="cuda") // side
    places[:, 2] = torch.arange(side * side, device="cuda") % side
    out = model(packed[0], timestep=t / 1000, guidance=torch.full((n,), 3.5, device="cuda"), encoder_hidden_states=text,
                pooled_projections=torch.randn(n, 768, device="cuda", dtype=weights), img_ids=places,
                txt_ids=torch.zeros(256, 3, device="cuda", dtype=weights)).sample
    return out, packed[1]


channels = 4 if args.model in ("unet", "dit") else 16
for step in range(3):
    latents = torch.randn(args.batch, channels, args.latent, args.latent, device="cuda", dtype=weights)
    noise = torch.randn_like(latents)
    with torch.autocast("cuda", dtype=amp, enabled=amp is not None):
        out, target = predict(latents, noise)
        loss = F.mse_loss(out.float(), target.float())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if ema:
        ema.step(model.parameters())
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
