"""A diffusion UNet of diffusers in a plain loop."""

import torch
from diffusers import UNet2DModel
from switches import adam, applied, micro_batches, precision

args = applied(batch=8, image=64)
model = UNet2DModel(
    sample_size=args.image, block_out_channels=(128, 256, 512), layers_per_block=2,
    down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
).cuda()  # fmt: skip
if args.apply == "checkpoint":
    model.enable_gradient_checkpointing()
optimizer = adam(model.parameters(), args.apply)
for _ in range(3):
    images = torch.randn(args.batch, 3, args.image, args.image).cuda()
    times = torch.randint(0, 1000, (args.batch,)).cuda()
    for image, time in micro_batches(args.apply, images, times):
        with precision(args.apply):
            loss = torch.nn.functional.mse_loss(model(image, time).sample, image)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
