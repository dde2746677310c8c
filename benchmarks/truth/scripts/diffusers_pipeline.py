"""Sample pictures with a diffusers pipeline made of random weights."""
import argparse

import torch
from diffusers import (AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel, StableDiffusionPipeline, UNet2DConditionModel)
from transformers import CLIPTextConfig, CLIPTextModel

p = argparse.ArgumentParser()
p.add_argument("--pipeline", default="stable-diffusion", choices=["stable-diffusion", "dit"])
p.add_argument("--steps", type=int, default=6)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--image", type=int, default=512)
p.add_argument("--slicing", action="store_true")
p.add_argument("--tiling", action="store_true")
p.add_argument("--offload", action="store_true", help="keep only the running model on the GPU")
p.add_argument("--fp32", action="store_true")
args = p.parse_args()

torch.manual_seed(0)
dtype = torch.float32 if args.fp32 else torch.float16
vae = AutoencoderKL(block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
                    up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=4, sample_size=args.image)
scheduler = DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False)
if args.pipeline == "dit":
    model = DiTTransformer2DModel(num_layers=12, sample_size=args.image // 8, out_channels=8)
    pipeline = DiTPipeline(transformer=model, vae=vae, scheduler=scheduler).to(dtype=dtype)
else:
    unet = UNet2DConditionModel(sample_size=args.image // 8, block_out_channels=(192, 384, 768, 768), cross_attention_dim=768)
    text = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12))
    pipeline = StableDiffusionPipeline(vae=vae, text_encoder=text, tokenizer=None, unet=unet, scheduler=scheduler, safety_checker=None,
                                       feature_extractor=None, requires_safety_checker=False).to(dtype=dtype)
if args.offload:
    pipeline.enable_model_cpu_offload()
else:
    pipeline.to("cuda")
if args.slicing:
    pipeline.vae.enable_slicing()
if args.tiling:
    pipeline.vae.enable_tiling()
pipeline.set_progress_bar_config(disable=True)
for _ in range(2):
    if args.pipeline == "dit":
        out = pipeline(class_labels=list(range(args.batch)), num_inference_steps=args.steps, output_type="np")
    else:
        with torch.no_grad():
            words = torch.randint(0, 40000, (2 * args.batch, 77), device="cuda")
            if args.offload:
                embeds = torch.randn(2 * args.batch, 77, 768, device="cuda", dtype=dtype)
            else:
                embeds = pipeline.text_encoder(words).last_hidden_state
        out = pipeline(prompt_embeds=embeds[: args.batch], negative_prompt_embeds=embeds[args.batch:], height=args.image,
                       width=args.image, num_inference_steps=args.steps, output_type="np")
    print(out.images.shape, torch.cuda.max_memory_allocated() // 2**20)
