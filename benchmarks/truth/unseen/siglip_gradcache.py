"""SigLIP training with a large effective batch: gradient caching (two passes over micro-batches)."""

try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse

import torch
import torch.nn.functional as F
from transformers import SiglipConfig, SiglipModel, SiglipTextConfig, SiglipVisionConfig

ap = argparse.ArgumentParser()
ap.add_argument("--global-batch", type=int, default=512)
ap.add_argument("--micro", type=int, default=64)
ap.add_argument("--direct", action="store_true", help="one pass with the whole batch")
ap.add_argument("--image", type=int, default=224)
ap.add_argument("--layers", type=int, default=12)
ap.add_argument("--optim", default="adafactor", choices=["adafactor", "adamw"])
args = ap.parse_args()
torch.manual_seed(0)
config = SiglipConfig(
    text_config=SiglipTextConfig(num_hidden_layers=args.layers).to_dict(),
    vision_config=SiglipVisionConfig(num_hidden_layers=args.layers, image_size=args.image).to_dict(),
)
model = SiglipModel(config).cuda().train()
optimizer = (
    torch.optim.Adafactor(model.parameters(), lr=1e-3)
    if args.optim == "adafactor"
    else torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
)


def sigmoid_loss(img, txt):
    logits = img @ txt.t() * model.logit_scale.exp() + model.logit_bias
    sign = 2 * torch.eye(len(img), device=img.device) - 1
    return -F.logsigmoid(sign * logits).sum(-1).mean()


def encode(px, ids):
    with torch.autocast("cuda", torch.bfloat16):
        out = model(input_ids=ids, pixel_values=px)
    return F.normalize(out.image_embeds.float(), dim=-1), F.normalize(out.text_embeds.float(), dim=-1)


for step in range(2):
    px = torch.randn(args.global_batch, 3, args.image, args.image).pin_memory()
    ids = torch.randint(0, 32000, (args.global_batch, 64)).pin_memory()
    if args.direct:
        loss = sigmoid_loss(*encode(px.cuda(non_blocking=True), ids.cuda(non_blocking=True)))
        loss.backward()
    else:
        pieces = list(zip(px.split(args.micro), ids.split(args.micro)))
        with torch.no_grad():
            cached = [encode(p.cuda(non_blocking=True), i.cuda(non_blocking=True)) for p, i in pieces]
        img = torch.cat([c[0] for c in cached]).requires_grad_()
        txt = torch.cat([c[1] for c in cached]).requires_grad_()
        loss = sigmoid_loss(img, txt)
        loss.backward()
        for (p, i), gi, gt in zip(pieces, img.grad.split(args.micro), txt.grad.split(args.micro)):
            a, b = encode(p.cuda(non_blocking=True), i.cuda(non_blocking=True))
            torch.autograd.backward([a, b], [gi, gt])
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
