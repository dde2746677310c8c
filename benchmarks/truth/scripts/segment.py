"""Semantic segmentation with torchvision or SegFormer from transformers."""
import argparse

import torch

p = argparse.ArgumentParser()
p.add_argument("--model", choices=["deeplab", "fcn", "lraspp", "segformer"], default="deeplab")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--size", type=int, default=256)
p.add_argument("--amp", action="store_true")
args = p.parse_args()
if args.model == "segformer":
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=21)).cuda()
else:
    import torchvision_stub  # noqa: F401
    from torchvision.models import segmentation

    names = dict(deeplab="deeplabv3_resnet50", fcn="fcn_resnet50", lraspp="lraspp_mobilenet_v3_large")
    model = getattr(segmentation, names[args.model])(weights=None, weights_backbone=None, num_classes=21).cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
for step in range(3):
    x = torch.randn(args.batch, 3, args.size, args.size, device="cuda")
    y = torch.randint(0, 21, (args.batch, args.size, args.size), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
        if args.model == "segformer":
            loss = model(pixel_values=x, labels=y).loss
        else:
            loss = torch.nn.functional.cross_entropy(model(x)["out"], y, ignore_index=255)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
