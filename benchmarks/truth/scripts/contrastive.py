"""CLIP from transformers with its contrastive loss, or a SimCLR-like loss over a timm model with an EMA teacher."""
import argparse
import copy

import torch
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--kind", choices=["clip", "siglip", "simclr"], default="clip")
p.add_argument("--batch", type=int, default=32)
p.add_argument("--bf16", action="store_true")
args = p.parse_args()

if args.kind == "simclr":
    import torchvision_stub  # noqa: F401
    import timm

    model = timm.create_model("resnet18", num_classes=128).cuda()
    teacher = copy.deepcopy(model).requires_grad_(False)
else:
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_config(AutoConfig.for_model(args.kind)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
for step in range(3):
    pictures = torch.randn(args.batch, 3, 224, 224).to("cuda", non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=args.bf16):
        if args.kind == "simclr":
            a = F.normalize(model(pictures), dim=1)
            with torch.no_grad():
                b = F.normalize(teacher(pictures.flip(3)), dim=1)
            loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(args.batch, device="cuda"))
        else:
            ids = torch.randint(0, 1000, (args.batch, 64), device="cuda")
            loss = model(input_ids=ids, pixel_values=pictures, return_loss=True).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if args.kind == "simclr":
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters()):
                slow.lerp_(fast, 0.01)
    print(step, float(loss))
