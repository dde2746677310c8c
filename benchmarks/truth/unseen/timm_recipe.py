"""A timm recipe: mixup/cutmix, drop path, label smoothing, EMA, layer decay, LAMB or AdamW."""

try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler

ap = argparse.ArgumentParser()
ap.add_argument("model", nargs="?", default="convnext_tiny")
ap.add_argument("-b", type=int, default=64)
ap.add_argument("--img", type=int, default=224)
ap.add_argument("--opt", default="adamw")
ap.add_argument("--drop-path", type=float, default=0.2)
ap.add_argument("--amp-dtype", default="bfloat16")
ap.add_argument("--channels-last", action="store_true")
ap.add_argument("--grad-ckpt", action="store_true")
ap.add_argument("--ema", action="store_true")
ap.add_argument("--torchcompile", action="store_true")
ap.add_argument("--layer-decay", type=float, default=None)
args = ap.parse_args()

torch.manual_seed(42)
torch.backends.cudnn.benchmark = True
kw = dict(img_size=args.img) if "swin" in args.model or "vit" in args.model else {}
model = timm.create_model(args.model, num_classes=1000, drop_path_rate=args.drop_path, **kw).cuda()
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
if args.grad_ckpt:
    model.set_grad_checkpointing()
ema = ModelEmaV3(model, decay=0.9998) if args.ema else None
optimizer = create_optimizer_v2(model, opt=args.opt, lr=1e-3, weight_decay=0.05, layer_decay=args.layer_decay)
if args.torchcompile:
    model = torch.compile(model)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=1000)
loss_fn = SoftTargetCrossEntropy()
dtype = getattr(torch, args.amp_dtype)
scaler = NativeScaler() if dtype == torch.float16 else None

model.train()
for i in range(4):
    x = torch.randn(args.b, 3, args.img, args.img, device="cuda")
    if args.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (args.b,), device="cuda")
    x, y = mixup(x, y)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        loss = loss_fn(model(x), y)
    optimizer.zero_grad()
    if scaler is not None:
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if ema is not None:
        ema.update(getattr(model, "_orig_mod", model), step=i)
    torch.cuda.synchronize()
    print(i, loss.item())

if ema is not None:
    with torch.inference_mode(), torch.autocast("cuda", dtype=dtype):
        ema.module.eval()
        print(ema.module(torch.randn(args.b * 2, 3, args.img, args.img, device="cuda")).argmax(1)[:4])
