"""A diffusion UNet of diffusers in a plain loop."""

import torch
from diffusers import UNet2DModel
from switches import applied, micro_batches, precision

args = applied(batch=8, image=64)
model = UNet2DModel(
    sample_size=args.image, block_out_channels=(128, 256, 512), layers_per_block=2,
    down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
).cuda()  # fmt: skip
if args.apply == "checkpoint":
    model.enable_gradient_checkpointing()
# 8-bit states are left out: torchao compiles its step for every shape of the many here, which takes minutes.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if args.apply == "fused" else None)
for _ in range(3):
    images = torch.randn(args.batch, 3, args.image, args.image).cuda()
    times = torch.randint(0, 1000, (args.batch,)).cuda()
    for image, time in micro_batches(args.apply, images, times):
        with precision(args.apply):
            loss = torch.nn.functional.mse_loss(model(image, time).sample, image)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
